"""DEQL against the linear recommenders that it generalises, on users it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from assay.core.errors import NotApplicable
from assay.core.ratings import read_ratings
from assay.models import DEQL, EASE, EDLAE, deql_grid, ndcg_at_k, recall_at_k
from assay.reference.ratings import load
from assay.trials import Arm, Metric, Trial
from assay.trials._trial import Budget, Measured

_VALIDATION = 0.2
_TEST = 0.2
_HELD_OUT = 0.2
_LEAST_ITEMS = 5
_LEAST_USERS = 10


@dataclass(frozen=True)
class Split:
    """Training users, and for validation and test users the items shown and the items to be found."""

    train: csr_matrix
    validation: tuple[csr_matrix, csr_matrix]
    test: tuple[csr_matrix, csr_matrix]


def prepare(source: str | Path, *, seed: int, budget: Budget) -> Split:
    """Split users at random into training, validation and test, and the items of the latter two 80 to 20.

    Every interaction counts 1. Items that no training user has are dropped; validation and test users need at least
    five of the others.
    """
    if str(source).startswith("builtin:"):
        R = load(n_users=budget["n_users"], n_items=budget["n_items"], seed=seed)
    else:
        R = read_ratings(source)
    R.data[:] = 1
    generator = np.random.default_rng(seed)
    users = generator.permutation(R.shape[0])
    n_test, n_validation = round(_TEST * len(users)), round(_VALIDATION * len(users))
    train = R[users[n_test + n_validation :]]
    known = np.flatnonzero(np.diff(train.tocsc().indptr))
    held = [_fold(R[part][:, known], generator) for part in (users[n_test : n_test + n_validation], users[:n_test])]
    if min(shown.shape[0] for shown, _ in held) < _LEAST_USERS:
        raise NotApplicable(
            f"{source}: too few users with {_LEAST_ITEMS} or more items: {_LEAST_USERS} are needed for validation and "
            f"{_LEAST_USERS} for the test, each a fifth of all users"
        )
    return Split(train[:, known], held[0], held[1])


def _fold(R: csr_matrix, generator: np.random.Generator) -> tuple[csr_matrix, csr_matrix]:
    """Part each user's items at random into shown and held out, at least one held out."""
    R = R[np.diff(R.indptr) >= _LEAST_ITEMS].tocsr()
    counts = np.diff(R.indptr)
    rows = np.repeat(np.arange(R.shape[0]), counts)
    order = np.lexsort((generator.random(R.nnz), rows))
    rank = np.arange(R.nnz) - np.repeat(R.indptr[:-1], counts)
    out = rank < np.repeat(np.maximum(1, np.round(_HELD_OUT * counts)), counts)

    def part(chosen: np.ndarray) -> csr_matrix:
        return csr_matrix((np.ones(chosen.sum()), (rows[chosen], R.indices[order[chosen]])), shape=R.shape)

    return part(~out), part(out)


def _measure(ranked: np.ndarray, held_out: csr_matrix) -> Measured:
    depth = ranked.shape[1]
    return {
        "ndcg@100": float(ndcg_at_k(held_out, ranked, depth).mean()),
        "recall@20": float(recall_at_k(held_out, ranked, min(20, depth)).mean()),
        "recall@50": float(recall_at_k(held_out, ranked, min(50, depth)).mean()),
        "coverage@20": np.unique(ranked[:, :20][ranked[:, :20] >= 0]).size / held_out.shape[1],
    }


def _depth(split: Split) -> int:
    return min(100, int(split.train.shape[1]))


def _tuned(estimator: Any, settings: Callable[[Budget], Sequence[dict[str, Any]]]) -> Callable[..., Measured]:
    """An arm that takes the setting with the best NDCG on the validation users to the test users."""

    def run(data: Split, *, seed: int, budget: Budget) -> Measured:
        depth = _depth(data)

        def validate(model: Any) -> float:
            shown, held_out = data.validation
            return float(ndcg_at_k(held_out, model.recommend(shown, depth)[0], depth).mean())

        grid = settings(budget)
        rows = deql_grid(data.train, grid, validate, estimator=estimator)
        best = grid[int(np.argmax([row["value"] for row in rows]))]
        model = type(estimator)(**(estimator.get_params() | best)).fit(data.train)
        shown, held_out = data.test
        return _measure(model.recommend(shown, depth)[0], held_out)

    return run


def _deql_settings(budget: Budget) -> list[dict[str, Any]]:
    # l2 is chosen so that it does not move with b: then all b of one (p, r) share a factorisation.
    return [
        {"b": b, "p": p, "l2": r * (1 - p) ** 2 * (p + (1 - p) * b**2)}
        for b, p, r in product(budget["b"], budget["p"], budget["r"])
    ]


def _zero_diag_settings(budget: Budget) -> list[dict[str, Any]]:
    # b only rescales l2 here, so that l2 is left as it is: each b then is a ridge of its own.
    return [{"b": b, "p": p, "l2": r * (1 - p) ** 2} for b, p, r in product(budget["b"], budget["p"], budget["r"])]


def _edlae_settings(budget: Budget) -> list[dict[str, Any]]:
    ridges = np.geomspace(min(budget["r"]), max(budget["r"]), len(budget["r"]) * len(budget["b"]))
    return [{"p": p, "l2": float(r)} for p, r in product(budget["p"], ridges)]


def _ease_settings(budget: Budget) -> list[dict[str, Any]]:
    n_points = len(budget["r"]) * len(budget["b"]) * len(budget["p"])
    return [{"l2": float(r)} for r in np.geomspace(min(budget["r"]), max(budget["r"]), n_points)]


def _popularity(data: Split, *, seed: int, budget: Budget) -> Measured:
    """The items that most training users have, without those shown; nothing to tune."""
    shown, held_out = data.test
    depth = _depth(data)
    order = np.argsort(-np.asarray(data.train.sum(axis=0)).ravel(), kind="stable")
    # No user can have seen more of the list than all that the user has.
    order = order[: depth + int(np.diff(shown.indptr).max())]
    seen = shown[:, order].toarray() != 0
    kept = np.argsort(seen, axis=1, kind="stable")[:, :depth]
    return _measure(np.where(np.take_along_axis(seen, kept, axis=1), -1, order[kept]), held_out)


TRIAL = Trial(
    slug="deql",
    question="Does weighting dropped and kept entries apart recommend better to new users than EDLAE and EASE?",
    subject="ratings",
    builtin="builtin:ratings",
    prepare=prepare,
    arms=(
        Arm("deql", _tuned(DEQL(), _deql_settings), "DEQL with a ridge; b, p and l2 tuned"),
        Arm("deql zero-diag", _tuned(DEQL(zero_diag=True), _zero_diag_settings), "the same with a zero diagonal"),
        Arm("edlae", _tuned(EDLAE(), _edlae_settings), "denoising autoencoder, zero diagonal; p and l2 tuned"),
        Arm("ease", _tuned(EASE(), _ease_settings), "ridge regression with a zero diagonal; l2 tuned"),
        Arm("popularity", _popularity, "the most popular items that the user does not have"),
    ),
    metrics=(
        Metric("ndcg@100", "higher", "", "discounted gain of the first 100 recommendations, 1 is ideal"),
        Metric("recall@20", "higher", "", "held-out items among the first 20, of min(20, held out)"),
        Metric("recall@50", "higher", "", "held-out items among the first 50, of min(50, held out)"),
        Metric("coverage@20", None, "", "share of the items that anyone is shown among the first 20"),
    ),
    budgets={
        "quick": {
            "seeds": 3,
            "n_users": 2000,
            "n_items": 300,
            "b": (0.25, 0.5, 1.0, 2.0),
            "p": (0.25, 0.5, 0.75),
            "r": (10.0, 100.0, 1000.0),
        },
        "full": {
            "seeds": 10,
            "n_users": 2000,
            "n_items": 300,
            "b": (0.1, 0.25, 0.5, 0.75, 1.0, 2.0),
            "p": (0.1, 0.25, 0.5, 0.75),
            "r": (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
        },
    },
)
