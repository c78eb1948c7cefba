"""Does a cache that shrinks only when it must disturb a model less than one that rounds at once, in the same memory?

Text is fed a few tokens at a time and never sampled, so that every arm sees the same tokens; what differs is what each
token sees of the past. Within one step tokens see each other exactly, in every arm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from assay.compress import ProgressiveKVCache, allocate_bits, kv_sensitivity, layer_bytes, quantize_kv, smooth_keys
from assay.compress._kv_cache import ProgressiveLayer
from assay.core.anatomy import anatomy
from assay.core.errors import InputError
from assay.core.loss import require_causal
from assay.core.text import token_windows
from assay.reference import checkpoint
from assay.reference._text import sample
from assay.trials._trial import Arm, Budget, Measured, Metric, Trial

# The widths that a layer may end with, and their mean, which is every arm's width of codes.
_CHOICES = (2, 4)
_MEAN_BITS = 3
# KIVI's own settings: entries a group, and 16 bits for each of the two constants of a group.
_KIVI_GROUP = 32
_KIVI_CONSTANTS = 32
# Positions that the calibration's tokens are apart; a window of it is as much shorter than the text.
_SCALE = 4


@dataclass(frozen=True)
class Data:
    """What all arms of one seed share.

    Attributes:
        model: the checkpoint in float32; an arm works on a copy.
        windows: token ids that are judged, [windows, tokens].
        calibration: token ids from another part of the text.
        hidden: the last hidden states of the model as it is on `windows`.
        window: tokens that gather at 16 bits.
        step: tokens fed at a time.
    """

    model: Any
    windows: Tensor
    calibration: Tensor
    hidden: Tensor
    window: int
    step: int


@torch.no_grad()
def prepare(source: str, *, seed: int, budget: Budget) -> Data:
    """Loads the checkpoint, draws text for calibration and judgement, and runs the model as it is.

    Args:
        source: "builtin:tiny-lm" or the directory of a causal language model.
        seed: where the text is cut.
        budget: "windows", "calibration" and "tokens", fewer where the model has fewer positions.

    Raises:
        CheckpointError: the model or its tokenizer cannot be loaded.
        NotApplicable: it predicts no next token.
        InputError: it has too few positions.
    """
    opened = checkpoint(source)
    model, tokenizer = opened.load(torch.float32).eval(), opened.tokenizer()
    require_causal(anatomy(model))
    tokens = min(budget["tokens"], getattr(model.config, "max_position_embeddings", None) or budget["tokens"])
    if tokens < 64:
        raise InputError(f"{source} has {tokens} positions: the trial needs 64")
    rng = np.random.default_rng(seed)
    text = sample("prose")
    halves = text[: len(text) // 2], text[len(text) // 2 :]
    drawn = []
    for half, n, context in zip(
        halves, (budget["calibration"], budget["windows"]), (tokens // _SCALE, tokens), strict=True
    ):
        cut = half[int(rng.integers(0, 2000)) :]
        rows = token_windows(tokenizer, [cut], tokens=10**6, context=context).input_ids
        drawn.append(rows[torch.from_numpy(rng.permutation(len(rows))[:n])])
    calibration, windows = drawn
    backbone = anatomy(model).backbone
    hidden = torch.cat([backbone(row[None], use_cache=False)[0] for row in windows])
    # As much of the text as 128 tokens are of 2,048.
    return Data(model, windows, calibration, hidden, window=max(1, tokens // 16), step=max(1, tokens // 64))


# ---- baselines ---------------------------------------------------------------------------------------------------


class _ShiftedLayer(ProgressiveLayer):
    """Halves the width by dropping the lower bits."""

    @staticmethod
    def halve(codes: Tensor, bits: int) -> tuple[Tensor, float]:
        return codes >> bits, 2.0**bits


class _ShiftedCache(ProgressiveKVCache):
    _layer = _ShiftedLayer


class _KiviLayer(DynamicLayer):
    """KIVI: keys rounded per channel in groups of tokens, values per token; the latest tokens left as they are.

    Keys wait until the window is full and are then rounded together; of the values, exactly the latest `window` wait.
    What was rounded once stays so. The cache is simulated: rounded values are held in float32.
    """

    def __init__(self, bits: int, window: int) -> None:
        super().__init__()
        self.bits, self.residual, self.group = bits, window, math.gcd(window, _KIVI_GROUP)
        self.rounded = [0, 0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        length = keys.shape[-2]
        self.keys, self.values = keys.clone(), values.clone()
        done, until = self.rounded[0], length - length % self.residual
        if until > done:
            channels = keys[..., done:until, :].transpose(-1, -2)
            self.keys[..., done:until, :] = quantize_kv(channels, self.bits, self.group).transpose(-1, -2)
        self.rounded[0] = until
        done, until = self.rounded[1], max(0, length - self.residual)
        if until > done:
            group = math.gcd(values.shape[-1], _KIVI_GROUP)
            self.values[..., done:until, :] = quantize_kv(values[..., done:until, :], self.bits, group)
        self.rounded[1] = until
        return keys, values


def _kivi_bytes(config: Any, tokens: int, window: int, bits: int) -> float:
    """Bytes of a layer of KIVI for one sequence: codes and constants, and 16 bits for what waits."""
    _, heads, width = _shape(config)
    keys, values = tokens - tokens % window, max(0, tokens - window)
    total = 0.0
    for done, along in ((keys, window), (values, width)):
        total += heads * width * (done * (bits + _KIVI_CONSTANTS / math.gcd(along, _KIVI_GROUP)) + (tokens - done) * 16)
    return total / 8


# ---- arms --------------------------------------------------------------------------------------------------------


def _shape(config: Any) -> tuple[int, int, int]:
    """Layers, key-value heads of a layer, and their width."""
    two_bytes = layer_bytes(config, 1, 16, count_scales=False)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, two_bytes // (4 * width), width


@torch.no_grad()
def _measured(
    data: Data, model: Any, cache: Cache, stored: Callable[[], float], widths: Callable[[], Sequence[int]]
) -> Measured:
    """Feeds the text through the cache; `stored` and `widths` are asked at the end.

    Args:
        data: the text and what the model as it is makes of it.
        model: the model that fills the cache.
        cache: an empty cache.
        stored: bytes of the whole cache for one sequence.
        widths: bits of the codes, layer by layer.
    """
    divergence, loss = [], 0.0
    targets, exact = data.windows[:, 1:], anatomy(data.model)
    for start in range(0, data.windows.shape[1], data.step):
        piece = slice(start, start + data.step)
        changed = model(data.windows[:, piece], past_key_values=cache, use_cache=True).logits
        log_q = changed.float().log_softmax(-1)
        log_p = exact.logits(data.hidden[:, piece]).float().log_softmax(-1)
        divergence.append((log_p.exp() * (log_p - log_q)).sum(-1).double().mean().item())
        wanted = targets[:, piece]
        loss -= log_q[:, : wanted.shape[1]].gather(-1, wanted[..., None]).double().sum().item()
    n = len(divergence)
    layers, heads, width = _shape(model.config)
    return {
        "mean KL": float(np.mean(divergence)),
        "KL in the first half": float(np.mean(divergence[: n // 2])),
        "KL in the last quarter": float(np.mean(divergence[-max(1, n // 4) :])),
        "stored bits": 8 * stored() / (2 * layers * heads * width * data.windows.shape[1]),
        "final width": float(np.mean(widths())),
        "perplexity": math.exp(loss / targets.numel()),
    }


def _progressive(
    data: Data,
    *,
    seed: int,
    budget: Budget,
    smooth: bool = True,
    allocate: bool = True,
    at_once: bool = False,
    kind: type[ProgressiveKVCache] = ProgressiveKVCache,
) -> Measured:
    model: Any = copy.deepcopy(data.model)
    batches = data.calibration.split(8)
    if smooth:
        smooth_keys(model, batches, position_scale=_SCALE)
    config, tokens = model.config, data.windows.shape[1]
    n_layers = config.num_hidden_layers
    sizes = {b: layer_bytes(config, tokens, b, window=data.window) for b in _CHOICES}
    room = n_layers * sum(sizes.values()) / len(sizes)
    budgets, starts = [room / n_layers] * n_layers, [16] * n_layers
    if allocate:
        sensitivity = kv_sensitivity(model, batches, _CHOICES, position_scale=_SCALE)
        bits = allocate_bits(sensitivity, sizes, room)
        budgets = [float(sizes[b]) for b in bits]
        starts = list(bits) if at_once else starts
    cache = kind(config, budgets, window=data.window, start_bits=starts)
    return _measured(data, model, cache, lambda: cache.nbytes / len(data.windows), lambda: cache.bits)


def _kivi(data: Data, *, seed: int, budget: Budget, equal_bytes: bool = False) -> Measured:
    config, tokens = data.model.config, data.windows.shape[1]
    bits = _MEAN_BITS
    if equal_bytes:
        ours = sum(layer_bytes(config, tokens, b, window=data.window) for b in _CHOICES) / len(_CHOICES)
        bits = max(b for b in range(1, 17) if _kivi_bytes(config, tokens, data.window, b) <= ours)
    layers = [_KiviLayer(bits, data.window) for _ in range(config.num_hidden_layers)]
    size = len(layers) * _kivi_bytes(config, tokens, data.window, bits)
    return _measured(data, data.model, Cache(layers=list(layers)), lambda: size, lambda: [bits] * len(layers))


def _arm(name: str, about: str, **options: Any) -> Arm:
    run: Any = partial(_progressive, **options)
    return Arm(name, run, about)


TRIAL = Trial(
    slug="pm-kvq",
    question="Does a cache that shrinks only as it fills keep predictions closer than rounding at once, in equal room?",
    subject="checkpoint",
    builtin="builtin:tiny-lm",
    prepare=prepare,
    arms=(
        _arm("pm-kvq", "shrinks as it fills; widths of 2 and 4 bits by sensitivity; keys smoothed"),
        _arm("at once", "the same layers at the same widths from the first", at_once=True),
        _arm("unsmoothed", "keys as they are", smooth=False),
        _arm("uniform", "the same budget for every layer", allocate=False),
        _arm("right shift", "drops the lower bits where PM-KVQ rounds", kind=_ShiftedCache),
        Arm("kivi", _kivi, "3 bits at once, keys per channel, values per token; fewer bytes for constants"),
        Arm("kivi, equal bytes", partial(_kivi, equal_bytes=True), "as many bits as fit the bytes, constants included"),
    ),
    metrics=(
        Metric("mean KL", "lower", "nat", "KL(16-bit cache ‖ arm) per token, over the whole text"),
        Metric("KL in the first half", "lower", "nat", "the same, while the budgets are far"),
        Metric("KL in the last quarter", "lower", "nat", "the same, when the cache is full or nearly so"),
        Metric("stored bits", None, "bit", "per key or value at the end of the text, constants included"),
        Metric("final width", None, "bit", "of the codes at the end, mean over layers"),
        Metric("perplexity", None, "", "of the text"),
    ),
    budgets={
        "tiny": {"windows": 2, "calibration": 2, "tokens": 64, "seeds": 1},
        "quick": {"windows": 4, "calibration": 8, "tokens": 1024, "seeds": 1},
        "full": {"windows": 16, "calibration": 32, "tokens": 1024, "seeds": 5},
    },
)
