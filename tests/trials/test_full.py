"""The trial of every method at its full budget, recorded for the documentation: `make trials`.

`SLUG=deql make trials` runs one, `SLUG=deql,bof4 make trials` two. Each writes `docs/trials/SLUG.json` when it has finished.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from assay import __version__
from assay.core.catalogue import catalogue, method
from assay.core.output import write_text
from assay.core.results import jsonable
from assay.trials import TrialRun, run_trial

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "trials"
_ASKED = [s for s in os.environ.get("SLUG", "").split(",") if s]


def record(run: TrialRun) -> dict:
    """What the method's page shows of a finished trial."""
    verdict = run.verdict
    figure = verdict.figure().to_plotly_json()
    return {
        "slug": verdict.slug,
        "assay": __version__,
        "source": run.source,
        "workers": run.workers,
        "budget": verdict.budget,
        "seeds": list(verdict.seeds),
        "question": verdict.question,
        "sentence": verdict.sentence(),
        "arms": [a.name for a in verdict.arms],
        "metrics": [m.name for m in verdict.metrics],
        "arms_table": jsonable(verdict.arms_table()),
        "verdict_table": jsonable(verdict.table()),
        "cost_table": jsonable(verdict.cost_table()),
        # The page brings a template of its own.
        "figure": {
            "data": jsonable(figure["data"]),
            "layout": {k: jsonable(v) for k, v in figure["layout"].items() if k != "template"},
        },
    }


@pytest.mark.trial
@pytest.mark.parametrize("slug", [method(s).slug for s in _ASKED] or list(catalogue()))
def test_full_trial(slug: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "trial" not in request.config.getoption("-m"):
        pytest.skip("takes minutes: `make trials` runs it")
    run = run_trial(slug, budget="full", out=tmp_path, workers=2)
    failures = {a.name: a.failures for a in run.verdict.arms if a.failures}
    assert not failures
    RECORDS.mkdir(exist_ok=True)
    text = json.dumps(record(run), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(RECORDS / f"{slug}.json", text + "\n")
