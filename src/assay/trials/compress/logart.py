"""Does LogART's learned logarithmic grid damage a checkpoint less than its parts, plain powers of 2, and even steps?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from assay.compress import LogGrid, learn_rounding, search_log_grid
from assay.compress._blockwise import linear_layers, matrix
from assay.compress._uniform import Curvature, output_error, sweep, uniform_grid
from assay.core.anatomy import anatomy
from assay.core.loss import require_causal
from assay.reference import checkpoint
from assay.reference._text import sample
from assay.trials import Arm, Metric, Trial
from assay.trials._trial import Budget, Measured

# Logits held at a time.
_LOGITS = 2**24
# Bits a row for its grid, and for the 16-bit scale of even steps.
_GRID_BITS, _SCALE_BITS = 40, 16


@dataclass(frozen=True)
class Data:
    """What all arms of one seed share.

    Attributes:
        model: the checkpoint, a transformers model in float32; an arm works on a copy.
        grams: for each layer's name, the second moments of its inputs on the calibration text.
        fresh: the same on the held-out text, for measuring.
        windows: token ids of the held-out text, [windows, tokens].
    """

    model: nn.Module
    grams: dict[str, Tensor]
    fresh: dict[str, Tensor]
    windows: Tensor


def prepare(source: str, *, seed: int, budget: Budget) -> Data:
    """Loads the checkpoint, draws text for calibration and for measuring, and takes the moments of all layers' inputs.

    Args:
        source: "builtin:tiny-lm" or the directory of a causal language model.
        seed: which windows are drawn.
        budget: "calibration" and "windows" (how many), "tokens" (how long).

    Raises:
        CheckpointError: the model or its tokenizer cannot be loaded.
        NotApplicable: it predicts no next token.
    """
    opened = checkpoint(source)
    model, tokenizer = opened.load(torch.float32), opened.tokenizer()
    require_causal(anatomy(model))
    rng = np.random.default_rng(seed)
    ids = torch.tensor(tokenizer(sample("prose"), verbose=False)["input_ids"])
    longest = getattr(model.config, "max_position_embeddings", None) or budget["tokens"]
    length = min(budget["tokens"], longest, len(ids) // 4)
    half = len(ids) // 2

    def draw(text: Tensor, n: int) -> Tensor:
        starts = torch.from_numpy(rng.choice(len(text) - length, size=n, replace=False))
        return text[starts[:, None] + torch.arange(length)]

    calibration, windows = draw(ids[:half], budget["calibration"]), draw(ids[half:], budget["windows"])
    return Data(model, _grams(model, calibration), _grams(model, windows), windows)


@torch.no_grad()
def _grams(model: Any, windows: Tensor) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}

    def see(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        sums[name] = sums.get(name, 0) + rows.T @ rows

    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
        for name, layer in linear_layers(model, skip=("lm_head",))[0].items()
    ]
    for batch in windows.split(max(1, _LOGITS // (windows.shape[1] * model.config.vocab_size))):
        model(batch)
    for handle in handles:
        handle.remove()
    return sums


@torch.no_grad()
def _on_text(exact: Any, packed: Any, windows: Tensor) -> tuple[float, float]:
    """KL(exact ‖ packed) and the packed model's loss, per token."""
    divergence = loss = 0.0
    for batch in windows.split(max(1, _LOGITS // (windows.shape[1] * exact.config.vocab_size))):
        log_p, log_q = (model(batch).logits.float().log_softmax(-1) for model in (exact, packed))
        loss -= log_q[:, :-1].gather(-1, batch[:, 1:, None]).double().sum().item()
        divergence += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum().item()
    return divergence / windows.numel(), loss / windows[:, 1:].numel()


# From a weight, the moments of its inputs, the number of bits and the steps of learning to the rounded weight and the
# bits that it takes.
Rule = Callable[[Tensor, Tensor, int, int], tuple[Tensor, float]]


def _log(
    weight: Tensor,
    gram: Tensor,
    bits: int,
    iters: int,
    *,
    learned: bool = False,
    strict: bool = True,
    base: Any = "dynamic",
    asymmetric: bool = True,
    scale_search: bool = True,
) -> tuple[Tensor, float]:
    grid = search_log_grid(
        weight, gram, bits=bits, base=base, asymmetric=asymmetric, scale_search=scale_search, strict=strict
    )
    codes = learn_rounding(weight, grid, gram, iters=iters).codes if learned else grid.quantize(weight)[1]
    # What an ideal code of that many levels takes, so that more levels than 2^bits show.
    levels = max(len(row.unique()) for row in codes)
    return grid.dequantize(codes), max(bits, math.log2(levels)) + _GRID_BITS / weight.shape[1]


class _Levels:
    """A logarithmic grid as `sweep` asks for it."""

    def __init__(self, grid: LogGrid) -> None:
        self.grid = grid

    def nearest(self, weight: Tensor, start: int = 0) -> Tensor:
        """The nearest levels, on the logarithmic scale; the same at every column."""
        return self.grid.quantize(weight)[0]


def _log_swept(weight: Tensor, gram: Tensor, bits: int, iters: int) -> tuple[Tensor, float]:
    grid = search_log_grid(weight, gram, bits=bits)
    return sweep(weight, Curvature.of(gram), _Levels(grid)), bits + _GRID_BITS / weight.shape[1]


def _uniform(weight: Tensor, gram: Tensor, bits: int, iters: int, *, swept: bool) -> tuple[Tensor, float]:
    grid = uniform_grid(weight, bits=bits, importance=gram.diagonal())
    values = sweep(weight, Curvature.of(gram), grid) if swept else grid.nearest(weight)
    return values, bits + _SCALE_BITS / weight.shape[1]


def _run(data: Data, rule: Rule, *, seed: int, budget: Budget) -> Measured:
    measured: Measured = {}
    for bits in (3, 4):
        changed: Any = copy.deepcopy(data.model)
        errors, stored, weights = [], 0.0, 0
        for name, layer in linear_layers(changed, skip=("lm_head",))[0].items():
            exact = matrix(layer).clone()
            rounded, per_weight = rule(exact, data.grams[name], bits, budget["iters"])
            matrix(layer).copy_(rounded)
            errors.append(output_error(exact, rounded, data.fresh[name]))
            stored += per_weight * exact.numel()
            weights += exact.numel()
        divergence, loss = _on_text(data.model, changed, data.windows)
        measured |= {
            f"{bits}-bit KL": divergence,
            f"{bits}-bit output error": math.sqrt(float(np.mean(errors))),
            f"{bits}-bit perplexity": math.exp(loss),
            f"{bits}-bit size": stored / weights,
        }
    return measured


def _arm(name: str, rule: Rule, about: str) -> Arm:
    run: Any = partial(_run, rule=rule)
    return Arm(name, run, about)


def _metrics(bits: int) -> tuple[Metric, ...]:
    return (
        Metric(f"{bits}-bit KL", "lower", "nat", "KL(unquantised ‖ quantised) per token of held-out text"),
        Metric(f"{bits}-bit output error", "lower", "", "root of the mean relative squared output error of the layers"),
        Metric(f"{bits}-bit perplexity", "lower", "", "of the held-out text"),
        Metric(f"{bits}-bit size", None, "bit", "bits per weight with the levels in use, and the grid of each row"),
    )


TRIAL = Trial(
    slug="logart",
    question="Does LogART move a checkpoint's predictions less than its parts, powers of 2, even steps and GPTQ?",
    subject="checkpoint",
    builtin="builtin:tiny-lm",
    prepare=prepare,
    arms=(
        _arm("logart", partial(_log, learned=True), "two bases, scale, asymmetry, learned rounding; 2^bits codes"),
        _arm("search only", _log, "the same to nearest: +DBS +SFS +ABS"),
        _arm("+dbs +sfs", partial(_log, asymmetric=False), "two bases and scale, symmetric"),
        _arm("+dbs", partial(_log, asymmetric=False, scale_search=False), "two bases alone"),
        _arm("log2", partial(_log, base="log2", asymmetric=False, scale_search=False), "powers of 2, nearest"),
        _arm("as published", partial(_log, learned=True, strict=False), "LogART with more than 2^bits codes"),
        _arm("search + gptq", _log_swept, "LogART's grid, errors made good by later columns instead of learned"),
        _arm("uniform", partial(_uniform, swept=False), "even steps with clip search, nearest"),
        _arm("gptq", partial(_uniform, swept=True), "even steps with clip search, errors made good by later columns"),
    ),
    metrics=(*_metrics(3), *_metrics(4)),
    budgets={
        "quick": {"calibration": 16, "windows": 8, "tokens": 128, "iters": 150, "seeds": 2},
        "full": {"calibration": 32, "windows": 16, "tokens": 256, "iters": 500, "seeds": 5},
    },
)
