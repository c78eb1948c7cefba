"""Do levels that are optimal for the block size cost a checkpoint less than NF4, AF4 and rounding?"""

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

from assay.compress import Codebook, af4_codebook, bof4, nf4_codebook, rtn_codebook, solve_codebook
from assay.compress._blockwise import linear_layers, matrix
from assay.core.anatomy import anatomy
from assay.core.loss import require_causal
from assay.reference import checkpoint
from assay.reference._text import sample
from assay.trials import Arm, Metric, Trial
from assay.trials._trial import Budget, Measured

BLOCK = 64
# Logits held at a time.
_LOGITS = 2**24


@dataclass(frozen=True)
class Data:
    """What all arms of one seed share.

    Attributes:
        model: the checkpoint, a transformers model in float32; an arm works on a copy.
        rows: for each layer's name, which rows of its weight the error is measured on: half, drawn at random, so
            that the spread over seeds says how far the error depends on which weights were looked at.
        windows: token ids of the text windows, [windows, tokens].
        draws: weights from known laws, by name.
    """

    model: nn.Module
    rows: dict[str, Tensor]
    windows: Tensor
    draws: dict[str, Tensor]


def prepare(source: str, *, seed: int, budget: Budget) -> Data:
    """Loads the checkpoint and draws text windows, weight rows and random weights.

    Args:
        source: "builtin:tiny-lm" or the directory of a causal language model.
        seed: what is drawn.
        budget: "windows", "tokens" and "draws".

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
    length = min(budget["tokens"], longest, len(ids) // 2)
    starts = torch.from_numpy(rng.choice(len(ids) - length, size=budget["windows"], replace=False))
    windows = ids[starts[:, None] + torch.arange(length)]
    half = {
        name: torch.from_numpy(rng.permutation(len(matrix(layer)))[: max(1, len(matrix(layer)) // 2)])
        for name, layer in linear_layers(model, skip=("lm_head",))[0].items()
    }
    n = budget["draws"]
    draws = {
        "Gaussian": torch.from_numpy(rng.standard_normal(n)).float(),
        "Student-t": torch.from_numpy(rng.standard_t(5, n) / np.sqrt(5 / 3)).float(),
    }
    return Data(model, half, windows, draws)


@torch.no_grad()
def _on_text(exact: Any, packed: nn.Module, windows: Tensor) -> tuple[float, float]:
    """KL(exact ‖ packed) and the packed model's loss, per token; few windows at a time where the vocabulary is large."""
    divergence = loss = 0.0
    for batch in windows.split(max(1, _LOGITS // (windows.shape[1] * exact.config.vocab_size))):
        log_p, log_q = (model(batch).logits.float().log_softmax(-1) for model in (exact, packed))
        loss -= log_q[:, :-1].gather(-1, batch[:, 1:, None]).double().sum().item()
        divergence += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum().item()
    return divergence / windows.numel(), loss / windows[:, 1:].numel()


def _run(data: Data, levels: Callable[[], Codebook], opq: float | None, *, seed: int, budget: Budget) -> Measured:
    measured: Measured = {}
    book = levels()
    for law, w in data.draws.items():
        _, cost = bof4(w, codebook=book, block_size=BLOCK, opq=opq)
        measured[f"{law} error"] = cost.relative_error
        measured[f"{law} bits"] = cost.bits_per_weight
    packed, cost = bof4(copy.deepcopy(data.model), codebook=book, block_size=BLOCK, opq=opq)
    squared = absolute = energy = magnitude = 0.0
    for layer in cost.layers:
        rows = data.rows[layer.name]
        exact = matrix(data.model.get_submodule(layer.name))[rows].double()
        gap = packed.get_submodule(layer.name).packed.dequantize()[rows].double() - exact
        squared += gap.square().sum().item()
        absolute += gap.abs().sum().item()
        energy += exact.square().sum().item()
        magnitude += exact.abs().sum().item()
    divergence, loss = _on_text(data.model, packed, data.windows)
    return measured | {
        "weight error": squared / energy,
        "weight MAE": absolute / magnitude,
        "bits": cost.bits_per_weight,
        "logit KL": divergence,
        "perplexity": math.exp(loss),
    }


def _arm(name: str, levels: Callable[[], Codebook], opq: float | None, about: str) -> Arm:
    run: Any = partial(_run, levels=levels, opq=opq)
    return Arm(name, run, about)


TRIAL = Trial(
    slug="bof4",
    question="Do BOF4's levels damage weights and predictions less than NF4, AF4 and rounding, and in how many bits?",
    subject="checkpoint",
    builtin="builtin:tiny-lm",
    prepare=prepare,
    arms=(
        _arm("bof4-s+opq", partial(solve_codebook, BLOCK), 0.95, "signed blocks, outliers apart in 16 bits"),
        _arm("bof4-s", partial(solve_codebook, BLOCK), None, "signed blocks"),
        _arm("bof4", partial(solve_codebook, BLOCK, signed=False), None, "blocks by largest magnitude"),
        _arm("nf4", nf4_codebook, None, "QLoRA's normal-quantile levels"),
        _arm("nf4+opq", nf4_codebook, 0.95, "NF4 with outliers apart in 16 bits"),
        _arm("af4", partial(af4_codebook, BLOCK, zero_aware=True), None, "AF4, solved with its zero in place"),
        _arm("rtn", rtn_codebook, None, "even steps, largest weight with its sign (Q4_0)"),
    ),
    metrics=(
        Metric("weight error", "lower", "", "squared error of the model's weights over their energy"),
        Metric("logit KL", "lower", "nat", "KL(unquantised ‖ quantised) per token of held-out text"),
        Metric("weight MAE", "lower", "", "absolute error of the model's weights over their mean magnitude"),
        Metric("Gaussian error", "lower", "", "squared error of normal weights over their energy"),
        Metric("Student-t error", "lower", "", "the same for heavy tails (5 degrees of freedom)"),
        Metric("bits", "lower", "bit", "stored bits per weight of the model, constants and outliers included"),
        Metric("Gaussian bits", None, "bit", "stored bits per normal weight"),
        Metric("Student-t bits", None, "bit", "stored bits per heavy-tailed weight"),
        Metric("perplexity", None, "", "of the held-out text; differences are within noise on small models"),
    ),
    budgets={
        "quick": {"windows": 16, "tokens": 128, "draws": 2**18, "seeds": 2},
        "full": {"windows": 64, "tokens": 256, "draws": 2**20, "seeds": 8},
    },
)
