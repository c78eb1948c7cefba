"""Every trial of the catalogue: what it declares holds, and its arms run at a size that takes a second."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest

from assay.core.catalogue import catalogue
from assay.trials._runner import _find

# What makes a trial's quick budget small. A trial without an entry that has no budget called "tiny" is only looked at.
TINY = {
    "nerve": {"steps": 4, "stops": 3, "batch": 2, "context": 16, "text": 4000, "held": 2, "probe": 16},
    "inactive-heads": {"context": 16, "calibration": 2, "evaluation": 2},
    "rope-heads": {"steps": 4, "batch": 4, "prompts": 2, "heads": 1, "windows": 2, "context": 16},
    "noise-stability": {"passes": 24, "context": 8, "modulus": 7, "width": 8, "steps": 4, "every": 2, "gammas": (0.1,)},
    "bof4": {"windows": 2, "tokens": 16, "draws": 2**12},
    "deql": {"n_users": 300, "n_items": 40, "b": (0.5, 1.0), "p": (0.5,), "r": (10.0,)},
    "selective-rope": {
        "batch": 4,
        "width": 16,
        "parity_length": 4,
        "parity_learning_rates": (1e-2,),
        "parity_steps": 2,
        "copy_length": 3,
        "copy_layers": 1,
        "copy_learning_rates": (1e-2,),
        "copy_steps": 2,
        "rows": 40,
        "test_rows": 20,
    },
}

each = pytest.mark.parametrize("slug", list(catalogue()))


@each
def test_what_it_declares_holds(slug):
    module, attribute, trial = _find(slug)
    assert (module, attribute, trial) == _find(trial)
    names = [m.name for m in trial.metrics]
    assert len(set(names)) == len(names)
    assert {m.better for m in trial.metrics} <= {"higher", "lower", None}
    assert all(m.about for m in trial.metrics)
    assert all(trial.arm(a.name) is a for a in trial.arms)
    inspect.signature(trial.prepare).bind("source", seed=0, budget={})
    for arm in trial.arms:
        inspect.signature(arm.run).bind("data", seed=0, budget={})
    quick, full = trial.budgets["quick"], trial.budgets["full"]
    assert quick.keys() == full.keys()
    assert all(type(quick[k]) is type(full[k]) for k in quick)


@each
def test_its_arms_run_and_repeat(slug):
    trial = _find(slug)[2]
    if "tiny" not in trial.budgets and slug not in TINY:
        pytest.skip(f"no tiny budget for the trial of {slug}")
    assert TINY.get(slug, {}).keys() <= trial.budgets["quick"].keys()
    budget = trial.budgets.get("tiny") or trial.budgets["quick"] | TINY[slug]

    data = trial.prepare(trial.builtin, seed=0, budget=budget)
    measured = {arm.name: arm.run(data, seed=0, budget=budget) for arm in trial.arms}
    for name, found in measured.items():
        assert set(found) == {m.name for m in trial.metrics}, name
        assert all(isinstance(v, int | float) for v in found.values()), name
        assert any(math.isfinite(found[m.name]) for m in trial.metrics if m.better), name

    # In another order, so that an arm which changed the data that all share is seen.
    first, last = trial.arms[0], trial.arms[-1]
    again = trial.prepare(trial.builtin, seed=0, budget=budget)
    np.testing.assert_equal(last.run(again, seed=0, budget=budget), measured[last.name])
    np.testing.assert_equal(first.run(again, seed=0, budget=budget), measured[first.name])

    other = trial.prepare(trial.builtin, seed=1, budget=budget)
    changed = {arm.name: arm.run(other, seed=1, budget=budget) for arm in (first, last)}
    assert any(not _same(changed[name], measured[name]) for name in changed)


def _same(a, b):
    return all(a[k] == b[k] or (math.isnan(a[k]) and math.isnan(b[k])) for k in a)
