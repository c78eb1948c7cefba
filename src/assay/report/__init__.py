"""Results for people and programs: the terminal, one self-contained HTML page, JSON with a schema."""

from assay.report._data import SCHEMA_VERSION, findings_document, schema
from assay.report._page import compression_page, examination_page, trial_page
from assay.report._terminal import print_compression, print_examination, print_trial

__all__ = [
    "SCHEMA_VERSION",
    "compression_page",
    "examination_page",
    "findings_document",
    "print_compression",
    "print_examination",
    "print_trial",
    "schema",
    "trial_page",
]
