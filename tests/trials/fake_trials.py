"""Small trials whose numbers are known, for the runner's tests; child processes import this module."""

import atexit
import os
import random
import sys
import time
from pathlib import Path

from assay.core.errors import InputError
from assay.trials import Arm, Metric, Trial


def prepare(source, *, seed, budget):
    return {"seed": seed, "level": random.Random(seed).random(), "source": source}


def good(data, *, seed, budget):
    print("arms may print")
    return {"score": data["level"] + 0.1 + seed / 1000, "error": 1.0, "size": float(budget["size"])}


def plain(data, *, seed, budget):
    return {"score": data["level"], "error": 1.0, "size": 1.0}


def failing(data, *, seed, budget):
    if seed == 1:
        raise ZeroDivisionError("no luck\nwith this one")
    return plain(data, seed=seed, budget=budget)


def nan(data, *, seed, budget):
    return plain(data, seed=seed, budget=budget) | {"score": float("nan") if seed else float("inf")}


def short(data, *, seed, budget):
    return {"score": 1.0}


def refusing(data, *, seed, budget):
    raise InputError("this arm wants more data")


def dying(data, *, seed, budget):
    print("about to go", file=sys.stderr, flush=True)
    os._exit(7)


def pausing(data, *, seed, budget):
    # Waits until the test makes the file that the subject names, and says that it has begun.
    gate = Path(data["source"])
    gate.with_name(f"begun-{seed}-{os.getpid()}").touch()
    while seed and not gate.with_name("open").exists():
        time.sleep(0.02)
    return plain(data, seed=seed, budget=budget)


def leaving(data, *, seed, budget):
    atexit.register(Path(data["source"]).with_name("left").touch)
    return plain(data, seed=seed, budget=budget)


def hungry(data, *, seed, budget):
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    return plain(data, seed=seed, budget=budget)


def reading(data, *, seed, budget):
    assert sys.stdin.read() == ""
    return plain(data, seed=seed, budget=budget) | {"size": float(os.environ["OMP_NUM_THREADS"])}


METRICS = (
    Metric("size", None, "kB"),
    Metric("score", "higher", "points", "the headline"),
    Metric("error", "lower"),
)


def trial(*arms, prepare=prepare, subject="table"):
    return Trial(
        slug="fake",
        question="Is good better than plain?",
        subject=subject,
        builtin="builtin:nothing",
        prepare=prepare,
        arms=tuple(Arm(run.__name__, run, f"the {run.__name__} arm") for run in arms),
        metrics=METRICS,
        budgets={"quick": {"seeds": 2, "size": 3}, "full": {"seeds": 5, "size": 9}},
    )


def bad_prepare(source, *, seed, budget):
    raise KeyError("column")


def refusing_prepare(source, *, seed, budget):
    raise InputError(f"{source} has no rows")


def greedy_prepare(source, *, seed, budget):
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    time.sleep(0.3)
    return prepare(source, seed=seed, budget=budget)


GOOD = trial(good, plain)
OTHER = Trial(**(vars(trial(good, plain)) | {"slug": "other"}))
FAILING = trial(good, failing, nan, short, refusing, dying)
PAUSING = trial(good, pausing)
HUNGRY = trial(hungry, plain, prepare=greedy_prepare)
READING = trial(reading)
LEAVING = trial(leaving)
BAD_PREPARE = trial(good, prepare=bad_prepare)
REFUSING_PREPARE = trial(good, prepare=refusing_prepare)
