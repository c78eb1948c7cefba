"""An examination as JSON, in the shape that `findings.schema.json` describes."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from assay import __version__
from assay.core.results import Result, jsonable
from assay.examine import Examination

SCHEMA_VERSION = 1


def schema() -> dict[str, Any]:
    """The JSON Schema of `findings_document`."""
    return json.loads(files("assay.report").joinpath("findings.schema.json").read_text(encoding="utf-8"))


def findings_document(examination: Examination) -> dict[str, Any]:
    """What was found and measured, in JSON types."""
    sections: dict[str, Any] = {
        "health": examination.health,
        "loss": examination.loss,
        "heads": examination.heads,
        "rope_heads": examination.rope,
        "spectra": examination.nerve,
        "noise_stability": examination.stability,
        "four_bits": examination.four_bits,
    }
    return {
        "schema": "assay.findings",
        "version": SCHEMA_VERSION,
        "assay": __version__,
        "model": jsonable(examination.model),
        "settings": jsonable(examination.settings),
        "findings": jsonable(examination.findings),
        "sections": {k: _section(v) for k, v in sections.items()},
        "skipped": jsonable(examination.skipped),
        "cost": {"seconds": jsonable(examination.seconds), "peak_memory_bytes": examination.peak_memory},
    }


def _section(value: Any) -> Any:
    return value.to_dict() if isinstance(value, Result) else jsonable(value)
