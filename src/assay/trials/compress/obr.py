"""Does restoration make 4-bit, half-sparse weights cost a language model less than pruning and rounding in turn?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from assay.compress import Curvature, UniformGrid, obr_matrix, output_error, prune_mask, refine, uniform_grid
from assay.compress._sequential import Sequential, put
from assay.compress._uniform import sweep
from assay.core.anatomy import Anatomy, anatomy
from assay.core.loss import Drift, require_causal
from assay.reference import checkpoint
from assay.reference._text import sample, training_text
from assay.trials import Arm, Metric, Trial
from assay.trials._trial import Budget, Measured

BITS = 4
SPARSITY = 0.5
# Rounds of coordinate descent, in the arms that have it.
ROUNDS = 3
# Characters of the training text that calibration windows are drawn from.
_TEXT = 100_000


@dataclass(frozen=True)
class Data:
    """What all arms of one seed share.

    Attributes:
        model: the checkpoint, a transformers model in float32; an arm works on a copy of its blocks.
        calibration: token ids, [windows, tokens], drawn anew for each seed.
        held: token ids that no arm fits anything to, [windows, tokens].
    """

    model: nn.Module
    calibration: Tensor
    held: Tensor


def prepare(source: str, *, seed: int, budget: Budget) -> Data:
    """Loads the checkpoint and draws calibration windows and held-out windows from different texts.

    Args:
        source: "builtin:tiny-lm" or the directory of a causal language model.
        seed: what is drawn.
        budget: "windows", "held" and "tokens".

    Raises:
        CheckpointError: the model or its tokenizer cannot be loaded.
        NotApplicable: it predicts no next token.
    """
    opened = checkpoint(source)
    model, tokenizer = opened.load(torch.float32), opened.tokenizer()
    require_causal(anatomy(model))
    longest = getattr(model.config, "max_position_embeddings", None) or budget["tokens"]
    rng = np.random.default_rng(seed)

    def draw(text: str, n: int) -> Tensor:
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        length = min(budget["tokens"], longest, len(ids) // 2)
        starts = torch.from_numpy(rng.choice(len(ids) - length, size=n, replace=False))
        return ids[starts[:, None] + torch.arange(length)]

    return Data(model, draw(training_text("prose")[:_TEXT], budget["windows"]), draw(sample("prose"), budget["held"]))


@dataclass(frozen=True)
class _Changed:
    dense: Tensor
    error: float


def _separate(
    weight: Tensor, hessian: Tensor, curvature: Curvature, grid: UniformGrid, kept: Tensor, *, rounding: str
) -> tuple[Tensor, Tensor]:
    """Wanda's mask, then rounding: to the nearest level, or column by column with the errors of both passed on."""
    if rounding == "rtn":
        return grid.nearest(weight) * kept, kept
    return sweep(weight, curvature, grid, mask=kept), kept


def _sparsegpt(
    weight: Tensor, hessian: Tensor, curvature: Curvature, grid: UniformGrid, kept: Tensor, *, by_row: bool = False
) -> tuple[Tensor, Tensor]:
    """One sweep that prunes, in each block of columns, the weights with the least w²/U_ii² when it gets there."""
    chosen = torch.zeros_like(kept)
    U = curvature.U.diagonal().to(weight)

    def choose(columns: Tensor, start: int) -> Tensor:
        at = slice(start, start + columns.shape[1])
        scores = (columns / U[at]).square()
        rows = scores if by_row else scores.flatten()[None]
        least = torch.argsort(rows, dim=1, stable=True)[:, : int(rows.shape[1] * SPARSITY)]
        chosen[:, at] = torch.ones_like(rows, dtype=torch.bool).scatter_(1, least, False).view_as(columns)
        return chosen[:, at]

    return sweep(weight, curvature, grid, mask=choose), chosen


def _restored(
    weight: Tensor,
    hessian: Tensor,
    curvature: Curvature,
    grid: UniformGrid,
    kept: Tensor,
    *,
    rounding: Any = "gptq",
    mask_of_sweep: bool = False,
) -> tuple[Tensor, Tensor]:
    mask = _sparsegpt(weight, hessian, curvature, grid, kept)[1] if mask_of_sweep else kept
    values, result = obr_matrix(weight, hessian, mask=mask, grid=grid, rounding=rounding)
    return values, result.mask


def _run(data: Data, method: Any, rounds: int, *, seed: int, budget: Budget) -> Measured:
    found: Anatomy = anatomy(data.model)
    drift = Drift(data.model, data.held, anatomy_=found)

    def rule(name: str, weight: Tensor, hessian: Tensor | None) -> _Changed:
        H = torch.eye(weight.shape[1]) if hessian is None else hessian
        curvature = Curvature.of(H)
        grid = uniform_grid(weight, bits=BITS, scale_dtype=torch.bfloat16)
        kept = prune_mask(weight, sparsity=SPARSITY, hessian=H) & ~curvature.dead
        values, mask = method(weight, H, curvature, grid, kept)
        if rounds:
            values = refine(weight, values, curvature, grid, mask=mask, sweeps=rounds)
        return _Changed(values, output_error(weight, values, H))

    errors: list[float] = []
    new: dict[str, Tensor] = {}
    for outcome in Sequential(found, data.calibration, rule).run():
        errors += [changed.error for changed in outcome.layers.values()]
        new |= {name: changed.dense for name, changed in outcome.layers.items()}
    # The original has answered on the held-out windows already, and each arm has a process of its own.
    for name, dense in new.items():
        put(data.model.get_submodule(name), dense)
    moved = drift.measure()
    return {
        "logit KL": moved.kl.mean,
        "perplexity": moved.perplexity,
        "loss change": moved.loss_change.mean,
        "output error": sum(errors) / len(errors),
        "zeros": float(sum(int((d == 0).sum()) for d in new.values()) / sum(d.numel() for d in new.values())),
    }


def _arm(name: str, method: Any, about: str, rounds: int = 0) -> Arm:
    run: Any = partial(_run, method=method, rounds=rounds)
    return Arm(name, run, about)


TRIAL = Trial(
    slug="obr",
    question="At 4 bits and half of the weights pruned, does restoration keep a model closer to the original than one "
    "sweep that prunes and rounds, and than pruning and rounding in turn?",
    subject="checkpoint",
    builtin="builtin:tiny-lm",
    prepare=prepare,
    arms=(
        _arm("obr", _restored, "Wanda's mask, both restorations, the right half by a sweep"),
        _arm("obr-rtn", partial(_restored, rounding="rtn"), "the same, the right half to the nearest levels"),
        _arm("obr+descent", _restored, "obr, then coordinate descent on the codes", ROUNDS),
        _arm("obr, sparsegpt's mask", partial(_restored, mask_of_sweep=True), "obr on the mask of sparsegpt+gptq"),
        _arm("sparsegpt+gptq", _sparsegpt, "one sweep that chooses what to prune, prunes and rounds"),
        _arm("sparsegpt+gptq+descent", _sparsegpt, "the same, then coordinate descent on the codes", ROUNDS),
        _arm(
            "sparsegpt+gptq by row", partial(_sparsegpt, by_row=True), "the same as far as obr may choose: half a row"
        ),
        _arm("wanda+gptq", partial(_separate, rounding="gptq"), "Wanda's mask in one sweep that prunes and rounds"),
        _arm("wanda+rtn", partial(_separate, rounding="rtn"), "Wanda's mask, kept weights to the nearest levels"),
    ),
    metrics=(
        Metric("logit KL", "lower", "nat", "KL(original ‖ compressed) per token of held-out text"),
        Metric("output error", "lower", "", "mean over layers of the squared output error on calibration inputs"),
        Metric("perplexity", "lower", "", "of the held-out text"),
        Metric("loss change", None, "nat", "increase of the next-token loss per token of held-out text"),
        Metric("zeros", None, "", "share of the compressed layers' weights that are zero, pruned or rounded to it"),
    ),
    budgets={
        "quick": {"windows": 12, "held": 12, "tokens": 128, "seeds": 1},
        "full": {"windows": 32, "held": 64, "tokens": 256, "seeds": 5},
    },
)
