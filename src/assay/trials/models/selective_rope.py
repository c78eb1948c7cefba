"""Selective RoPE against RoPE and no positions, in gated linear attention: does it read longer than it trained?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from assay.core.errors import InputError
from assay.core.seeds import rng, spawn
from assay.models import GatedLinearAttention
from assay.reference import PREFIX
from assay.reference.sequences import SequenceTask, load, read_sequences
from assay.trials._trial import Arm, Budget, Measured, Metric, Trial

Position = Literal["none", "rope", "selective"]

_BATCH_TEST = 64
_MAX_VOCAB = 4096


@dataclass(frozen=True)
class _Part:
    tokens: Tensor
    targets: Tensor
    mask: Tensor


@dataclass(frozen=True)
class _Problem:
    """One training set, a validation set of the same lengths, and test sets by multiple of the training length."""

    train: _Part
    valid: _Part
    test: dict[int, _Part]
    vocab: int
    layers: int
    width: int
    steps: int
    rates: tuple[float, ...]
    pos_options: dict[str, Any]


@dataclass(frozen=True)
class _Data:
    running: _Problem
    copying: _Problem | None


def _part(task: SequenceTask, start: int = 0, stop: int | None = None, rows: slice = slice(None)) -> _Part:
    """The positions before `stop` of some rows, scored from `start` on."""
    mask = task.mask[rows, :stop] & (np.arange(task.mask[:, :stop].shape[1]) >= start)
    arrays = (task.tokens[rows, :stop], task.targets[rows, :stop], mask)
    return _Part(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays))


def _running(train: SequenceTask, test: SequenceTask, length: int, **how: Any) -> _Problem:
    """Targets that depend on the past only: train on the first `length` positions, test in the stretches after."""
    held = len(train.tokens) // 5
    return _Problem(
        train=_part(train, 0, length, slice(held, None)),
        valid=_part(train, 0, length, slice(held)),
        test={
            1: _part(test, 0, length),
            2: _part(test, length, 2 * length),
            4: _part(test, 2 * length, 4 * length),
        },
        vocab=train.vocab,
        **how,
    )


def prepare(source: str, *, seed: int, budget: Budget) -> _Data:
    """Draw parity and copying, or read sequences from a file; split into training, validation and test.

    Args:
        source: "builtin:sequences", or the path of an NPZ file with `tokens`, `targets` and `mask` in which a target
            depends only on the tokens up to it. Models then train on the first quarter of each sequence.
        seed: of the draw or the split.
        budget: one of the trial's budgets.

    Returns:
        What all arms of this seed share.

    Raises:
        InputError: a file that cannot be used for this.
    """
    how = {
        "layers": 1,
        "width": budget["width"],
        "steps": budget["parity_steps"],
        "rates": budget["parity_learning_rates"],
        # Every angle at temperature 1 and a drift, as the paper sets it for parity. With `nn.Linear`'s own small phases
        # at the start, half turns are found late; the other arms have no such phases.
        "pos_options": {"base": 1.0, "bias": True, "init_scale": 1.0},
    }
    draw = iter(spawn(seed, 6))
    if not source.startswith(PREFIX):
        task = read_sequences(source)
        length = task.tokens.shape[1] // 4
        # A batch without a scored position has no loss.
        usable = np.flatnonzero(task.mask[:, :length].any(axis=1))
        if len(usable) < 50 or length < 2:
            raise InputError(
                f"{source} has {len(usable)} sequences of {task.tokens.shape[1]} tokens that are scored in their first "
                "quarter: the trial needs 50 of at least 8"
            )
        if task.vocab > _MAX_VOCAB:
            raise InputError(f"{source} has {task.vocab} different tokens: this trial takes up to {_MAX_VOCAB}")
        order = rng(seed, "split").permutation(usable)
        held = len(order) // 5
        train, test = (
            SequenceTask(task.tokens[i], task.targets[i], task.mask[i], task.vocab)
            for i in (order[held:], order[:held])
        )
        running = _running(train, test, length, **how)
        for multiple, part in running.test.items():
            if not part.mask.any():
                raise InputError(f"{source} scores nothing at {multiple} times the training length of {length} tokens")
        return _Data(running, None)

    bits = budget["parity_length"]
    # The start token takes the first position, so `bits + 1` positions hold `bits` bits.
    train = load(task="parity", length=bits, n=budget["rows"], seed=next(draw))
    test = load(task="parity", length=4 * bits + 3, n=budget["test_rows"], seed=next(draw))
    letters = budget["copy_length"]
    copies = {
        "train": load(task="copy", length=letters, n=budget["rows"], seed=next(draw), min_length=2),
        "valid": load(task="copy", length=letters, n=budget["test_rows"], seed=next(draw), min_length=2),
        "test": load(task="copy", length=letters, n=budget["test_rows"], seed=next(draw)),
        "longer": load(task="copy", length=2 * letters, n=budget["test_rows"], seed=next(draw)),
    }
    return _Data(
        _running(train, test, bits + 1, **how),
        _Problem(
            train=_part(copies["train"]),
            valid=_part(copies["valid"]),
            test={1: _part(copies["test"]), 2: _part(copies["longer"])},
            vocab=copies["train"].vocab,
            layers=budget["copy_layers"],
            width=budget["width"],
            steps=budget["copy_steps"],
            rates=budget["copy_learning_rates"],
            pos_options={"conv": None, "temp": "rfa", "temp_max": 0.25},
        ),
    )


class _Block(nn.Module):
    def __init__(self, width: int, pos: Position, options: dict[str, Any] | None) -> None:
        super().__init__()
        self.mix_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mix = GatedLinearAttention(width, 4, pos=pos, pos_options=options)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.mix_norm(x))[0]
        a, b = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(a) * b)


class _Model(nn.Module):
    def __init__(self, problem: _Problem, pos: Position) -> None:
        super().__init__()
        options = problem.pos_options if pos == "selective" else None
        self.embed = nn.Embedding(problem.vocab, problem.width)
        self.blocks = nn.ModuleList([_Block(problem.width, pos, options) for _ in range(problem.layers)])
        self.norm, self.head = nn.RMSNorm(problem.width), nn.Linear(problem.width, problem.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _fit(problem: _Problem, pos: Position, rate: float, *, seed: int, batch: int) -> _Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _Model(problem, pos)
    draw = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, foreach=True)
    warm = max(1, problem.steps // 20)

    def schedule(step: int) -> float:
        return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / problem.steps)))

    plan = torch.optim.lr_scheduler.LambdaLR(optimiser, schedule)
    for _ in range(problem.steps):
        rows = torch.randint(len(problem.train.tokens), (batch,), generator=draw)
        mask = problem.train.mask[rows]
        loss = F.cross_entropy(model(problem.train.tokens[rows])[mask], problem.train.targets[rows][mask])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        plan.step()
    return model


@torch.no_grad()
def _measure(model: _Model, part: _Part) -> tuple[float, float]:
    """Accuracy and mean loss over the scored positions."""
    right, loss = 0, 0.0
    for start in range(0, len(part.tokens), _BATCH_TEST):
        rows = slice(start, start + _BATCH_TEST)
        mask = part.mask[rows]
        logits, targets = model(part.tokens[rows])[mask], part.targets[rows][mask]
        right += int((logits.argmax(-1) == targets).sum())
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
    scored = int(part.mask.sum())
    return right / scored, loss / scored


def _best(problem: _Problem, pos: Position, *, seed: int, budget: Budget) -> tuple[dict[int, float], float]:
    """Train once a learning rate, keep the lowest validation loss; its test accuracies by length, and its rate."""
    fitted = [(rate, _fit(problem, pos, rate, seed=seed, batch=budget["batch"])) for rate in problem.rates]
    # A run that diverged has a loss of nan, which min would be free to return.
    losses = np.nan_to_num([_measure(model, problem.valid)[1] for _, model in fitted], nan=math.inf)
    rate, model = fitted[int(losses.argmin())]
    return {multiple: _measure(model, part)[0] for multiple, part in problem.test.items()}, rate


def _run(data: _Data, *, seed: int, budget: Budget, pos: Position) -> Measured:
    running, rate = _best(data.running, pos, seed=seed, budget=budget)
    measured = {f"parity {m}x": a for m, a in running.items()} | {"parity learning rate": rate}
    copying: dict[int, float] = {1: math.nan, 2: math.nan}
    copy_rate = math.nan
    if data.copying is not None:
        copying, copy_rate = _best(data.copying, pos, seed=seed, budget=budget)
    return measured | {f"copy {m}x": a for m, a in copying.items()} | {"copy learning rate": copy_rate}


_COMMON = {
    "batch": 32,
    "width": 32,
    "parity_length": 16,
    "parity_learning_rates": (3e-3, 1e-2, 3e-2),
    "copy_length": 8,
    "copy_layers": 2,
    "copy_learning_rates": (3e-3, 1e-2),
}

TRIAL = Trial(
    slug="selective-rope",
    question="Does gated linear attention read sequences longer than it trained on if its rotations follow the input?",
    subject="sequences",
    builtin="builtin:sequences",
    prepare=prepare,
    arms=(
        Arm("selective", partial(_run, pos="selective"), "gated linear attention with Selective RoPE"),
        Arm("rope", partial(_run, pos="rope"), "the same layer with plain RoPE"),
        Arm("nope", partial(_run, pos="none"), "the same layer with no position embedding"),
    ),
    metrics=(
        Metric("parity 4x", "higher", "", "parity accuracy between 2 and 4 times the training length; chance is 0.5"),
        Metric("parity 2x", "higher", "", "parity accuracy between 1 and 2 times the training length"),
        Metric("parity 1x", "higher", "", "parity accuracy up to the training length"),
        Metric("copy 2x", "higher", "", "accuracy of copying strings of twice the longest trained length"),
        Metric("copy 1x", "higher", "", "accuracy of copying strings of the longest trained length"),
        Metric("parity learning rate", None, "", "chosen on validation at the training length"),
        Metric("copy learning rate", None, "", "chosen on validation at the training length"),
    ),
    budgets={
        "quick": _COMMON | {"parity_steps": 150, "copy_steps": 40, "rows": 4096, "test_rows": 256, "seeds": 2},
        "full": _COMMON | {"parity_steps": 400, "copy_steps": 500, "rows": 8192, "test_rows": 512, "seeds": 5},
    },
)
