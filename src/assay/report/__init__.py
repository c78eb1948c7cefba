"""Results for people and programs: the terminal, one self-contained HTML page, JSON with a schema."""

from assay.report._data import SCHEMA_VERSION, findings_document, schema
from assay.report._page import examination_page, trial_page
from assay.report._terminal import print_examination, print_trial

__all__ = [
    "SCHEMA_VERSION",
    "examination_page",
    "findings_document",
    "print_examination",
    "print_trial",
    "schema",
    "trial_page",
]
