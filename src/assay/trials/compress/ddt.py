"""Does training by denoised codes beat the straight-through estimator where weights and activations have few bits?

Networks are trained from nothing: a character-level transformer on text, and on the 8 × 8 digits a perceptron of two
hidden layers behind norms and one of six layers without. Every arm trains once for each learning rate, and the rate with the least loss on validation data is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from assay.compress import ddt_convert
from assay.core.errors import InputError
from assay.core.seeds import generator, rng
from assay.core.text import read_texts
from assay.reference import PREFIX, builtin
from assay.trials import Arm, Metric, Trial
from assay.trials._trial import Budget, Measured

M = TypeVar("M", bound=nn.Module)

CONTEXT = 64
_WIDTH, _HEADS, _BLOCKS = 64, 4, 2
_VOCABULARY = 128
_LEAST = 50_000
_HIDDEN = 128
# Digits to validate and to test on, of 1,797.
_HELD, _TESTED = 300, 497


@dataclass(frozen=True)
class Setting:
    """How digits are learnt.

    Attributes:
        bits: of weights and of inputs.
        keep: which weights are kept.
        deep: six layers without norms instead of two behind norms.
    """

    bits: int
    keep: tuple[int, int] | None = None
    deep: bool = False


DIGITS = {
    "A1W1": Setting(1),
    "A2W2": Setting(2),
    "A4W4 2:4": Setting(4, keep=(2, 4)),
    "A1W1, deep": Setting(1, deep=True),
}


@dataclass(frozen=True)
class Data:
    """What all arms of one seed share.

    Attributes:
        train: the text that models learn from, as numbers of characters.
        valid: windows of other text, [windows, CONTEXT + 1], that learning rates are chosen on.
        test: windows of yet other text.
        vocabulary: different characters.
        pixels: the digits, [digits, 64], the held-out ones first, then those tested on.
        digit: which they show, [digits].
    """

    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: int
    pixels: Tensor
    digit: Tensor


def prepare(source: str, *, seed: int, budget: Budget) -> Data:
    """Reads the text, draws windows of its end, and splits the digits.

    Args:
        source: "builtin:prose", or a file of texts.
        seed: of the windows and of the split.
        budget: "windows".

    Raises:
        InputError: the text is too short, or the file cannot be read.
    """
    text = builtin(source).load() if source.startswith(PREFIX) else "\n\n".join(read_texts(source))
    if not isinstance(text, str):
        raise InputError(f"{source} is no plain text: use builtin:prose or a file of texts")
    if len(text) < _LEAST:
        raise InputError(f"{source} has {len(text)} characters: a character model needs {_LEAST} to learn from")
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known, count = np.unique(points, return_counts=True)
    # What is rare shares the last number.
    known = np.sort(known[np.argsort(-count, kind="stable")[: _VOCABULARY - 1]])
    place = np.searchsorted(known, points).clip(max=len(known) - 1)
    ids = torch.from_numpy(np.where(known[place] == points, place, len(known)))
    draw = rng(seed, "split")
    held = len(ids) // 10

    def windows(start: int) -> Tensor:
        first = torch.from_numpy(draw.integers(start, start + held - CONTEXT - 1, budget["windows"]))
        return ids[first[:, None] + torch.arange(CONTEXT + 1)]

    digits = load_digits()
    order = draw.permutation(len(digits.target))
    return Data(
        train=ids[: len(ids) - 2 * held],
        valid=windows(len(ids) - 2 * held),
        test=windows(len(ids) - held),
        vocabulary=len(known) + 1,
        pixels=torch.from_numpy(digits.data[order] / 8 - 1).float(),
        digit=torch.from_numpy(digits.target[order]).long(),
    )


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Characters(nn.Module):
    """A small transformer that predicts the next character."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, _WIDTH), nn.Embedding(CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(_BLOCKS)))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [batch, tokens, vocabulary]."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def _perceptron(deep: bool) -> nn.Sequential:
    hidden: list[nn.Module]
    if deep:
        hidden = [m for _ in range(6) for m in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        return nn.Sequential(nn.Linear(64, _WIDTH), nn.Tanh(), *hidden, nn.Linear(_WIDTH, 10))
    hidden = [m for _ in range(2) for m in (nn.LayerNorm(_HIDDEN), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, _HIDDEN), nn.ReLU(), *hidden, nn.LayerNorm(_HIDDEN), nn.Linear(_HIDDEN, 10))


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _fit(
    model: nn.Module, batch: Callable[[torch.Generator], tuple[Tensor, Tensor]], rate: float, steps: int, *, seed: int
) -> None:
    """AdamW with a warm-up, a cosine and clipping: one recipe, whatever is trained."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, foreach=True)
    warm = max(1, steps // 10)
    plan = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    draw = generator(seed, "batches")
    for _ in range(steps):
        x, y = batch(draw)
        optimiser.zero_grad()
        _loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        plan.step()


@dataclass(frozen=True)
class _Fitted:
    rate: float
    valid: float
    loss: float
    right: float


@torch.no_grad()
def _measure(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    logits = model(x)
    loss = float(_loss(logits, y))
    # What diverged has learnt nothing; a missing number would hide that.
    return loss if math.isfinite(loss) else math.inf, float((logits.argmax(-1) == y).float().mean())


def _text(data: Data, how: dict[str, Any] | None, *, seed: int, budget: Budget) -> list[_Fitted]:
    """One model a learning rate, at A1W1."""

    def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        first = torch.randint(len(data.train) - CONTEXT, (budget["batch"], 1), generator=draw)
        tokens = data.train[first + torch.arange(CONTEXT + 1)]
        return tokens[:, :-1], tokens[:, 1:]

    found = []
    for rate in budget["text_rates"]:
        model = _made(lambda: Characters(data.vocabulary), seed)
        if how is not None:
            ddt_convert(model, 1, 1, **how)
        _fit(model, batch, rate, budget["text_steps"], seed=seed)
        valid, _ = _measure(model, data.valid[:, :-1], data.valid[:, 1:])
        found.append(_Fitted(rate, valid, *_measure(model, data.test[:, :-1], data.test[:, 1:])))
    return found


def _digits(data: Data, setting: Setting, how: dict[str, Any] | None, *, seed: int, budget: Budget) -> list[_Fitted]:
    held, tested = slice(_HELD), slice(_HELD, _HELD + _TESTED)
    pixels, digit = data.pixels[_HELD + _TESTED :], data.digit[_HELD + _TESTED :]

    def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(digit), (64,), generator=draw)
        return pixels[rows], digit[rows]

    found = []
    for rate in budget["digit_rates"]:
        model = _made(lambda: _perceptron(setting.deep), seed)
        if how is not None:
            ends = ("0", str(len(model) - 1))
            ddt_convert(model, setting.bits, setting.bits, keep=setting.keep, skip=ends, **how)
        _fit(model, batch, rate, budget["digit_steps"], seed=seed)
        valid, _ = _measure(model, data.pixels[held], data.digit[held])
        found.append(_Fitted(rate, valid, *_measure(model, data.pixels[tested], data.digit[tested])))
    return found


def _made(build: Callable[[], M], seed: int) -> M:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _run(data: Data, how: dict[str, Any] | None, *, seed: int, budget: Budget) -> Measured:
    text = _text(data, how, seed=seed, budget=budget)
    best = min(text, key=lambda f: f.valid)
    measured: Measured = {
        "text loss": best.loss,
        "text loss, highest rate": text[-1].loss,
        "text rate": best.rate,
    }
    fitted: dict[Any, list[_Fitted]] = {}
    for name, setting in DIGITS.items():
        # Without codes there is one network for all widths.
        network = setting if how is not None else setting.deep
        if network not in fitted:
            fitted[network] = _digits(data, setting, how, seed=seed, budget=budget)
        found = fitted[network]
        measured[f"digits {name}"] = min(found, key=lambda f: f.valid).right
        measured[f"digits {name}, highest rate"] = found[-1].right
    return measured


def _arm(name: str, how: dict[str, Any] | None, about: str) -> Arm:
    run: Any = partial(_run, how=how)
    return Arm(name, run, about)


_COMMON = {"batch": 8, "text_rates": (1e-2, 3e-2, 1e-1), "digit_rates": (3e-3, 1e-2, 3e-2)}

TRIAL = Trial(
    slug="ddt",
    question="Does a network with few bits learn better by denoised codes than with the straight-through estimator?",
    subject="texts",
    builtin="builtin:prose",
    prepare=prepare,
    arms=(
        _arm("ddt", {}, "codes regressed on with an intercept"),
        _arm("ddt linear", {"scheme": "linear"}, "codes regressed on through the origin"),
        _arm("ste", {"estimator": "ste"}, "straight-through estimator with the codes of ddt"),
        _arm("ste linear", {"estimator": "ste", "scheme": "linear"}, "the same with the codes of ddt linear"),
        _arm("full precision", None, "nothing quantised"),
    ),
    metrics=(
        Metric("text loss", "lower", "nat", "per character of test text, weights and inputs of 1 bit"),
        Metric("text loss, highest rate", "lower", "nat", "the same at the highest learning rate"),
        *(
            Metric(f"digits {name}{end}", "higher", "", f"test accuracy{about}")
            for end, about in (("", ""), (", highest rate", " at the highest learning rate"))
            for name in DIGITS
        ),
        Metric("text rate", None, "", "the learning rate with the least validation loss"),
    ),
    budgets={
        "tiny": _COMMON | {"text_steps": 2, "digit_steps": 2, "windows": 4, "seeds": 1},
        "quick": _COMMON | {"text_steps": 15, "digit_steps": 15, "windows": 32, "seeds": 2},
        "full": _COMMON | {"text_steps": 200, "digit_steps": 120, "windows": 128, "seeds": 5},
    },
)
