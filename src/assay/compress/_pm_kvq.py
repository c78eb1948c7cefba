"""PM-KVQ: a smaller key-value cache by widths per block, keys without outliers, and codes that shrink as they must."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from assay.compress._kv_cache import (
    WIDTHS,
    CacheFull,
    ProgressiveKVCache,
    decode,
    encode,
    fit_group,
    layer_bytes,
    quantize_kv,
    shrink_codes,
)
from assay.core.anatomy import Anatomy, Attention, anatomy
from assay.core.errors import InputError, NotApplicable
from assay.core.loss import require_causal
from assay.core.progress import Progress, silent
from assay.core.results import Column, Result, Table
from assay.core.trace import AttentionView, Batch, Reducer, trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "CacheFull",
    "PmKvqResult",
    "ProgressiveKVCache",
    "SmoothingResult",
    "allocate_bits",
    "kv_sensitivity",
    "layer_bytes",
    "pm_kvq",
    "quantize_kv",
    "shrink_codes",
    "smooth_keys",
]

# Logits held at a time, in bytes of float32.
_LOGITS_BYTES = 32 << 20
_LEAST, _MOST = 1e-4, 1e4
# The width at which smoothing is judged.
_SEARCH_BITS = 4


# ---- calibration -------------------------------------------------------------------------------------------------


def _inputs(found: Anatomy, token_batches: Iterable[Tensor], position_scale: int) -> list[dict[str, Tensor]]:
    """What the model is called with: tokens at every `position_scale`-th position."""
    if not isinstance(position_scale, int) or isinstance(position_scale, bool) or position_scale < 1:
        raise InputError(f"position_scale is {position_scale!r}: use a whole number from 1")
    batches = list(token_batches)
    if not batches:
        raise InputError("there are no token batches to calibrate on: give at least one")
    device = found.model.get_parameter(next(name for name, _ in found.model.named_parameters())).device
    longest = getattr(found.config, "max_position_embeddings", None)
    out = []
    for ids in batches:
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype.is_floating_point or ids.shape[1] < 2:
            said = f"{tuple(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise InputError(f"a token batch is {said}: pass token ids [batch, tokens] with at least 2 tokens")
        last = (ids.shape[1] - 1) * position_scale
        if longest is not None and last >= longest:
            raise InputError(
                f"position_scale {position_scale} puts the last of {ids.shape[1]} tokens at {last}, and the model has "
                f"{longest} positions: use shorter batches or a smaller scale"
            )
        ids = ids.to(device)
        inputs = {"input_ids": ids}
        # Some models count their positions themselves; at scale 1 nothing needs to be said.
        if position_scale > 1:
            positions = position_scale * torch.arange(ids.shape[1], device=device)
            # Without a mask, transformers would take the gaps for borders of packed sequences.
            inputs |= {"position_ids": positions.expand_as(ids), "attention_mask": torch.ones_like(ids)}
        out.append(inputs)
    return out


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no gradients for parameters."""
    training = model.training
    wanted = [p for p in model.parameters() if p.requires_grad]
    try:
        model.eval()
        for p in wanted:
            p.requires_grad_(False)
        yield
    finally:
        for p in wanted:
            p.requires_grad_(True)
        model.train(training)


# ---- sensitivity -------------------------------------------------------------------------------------------------


class _Probe(DynamicCache):
    """Stores nothing: stands where every model hands over keys and values, and waits there for their gradients."""

    def __init__(self, sensitivity: dict[int, Tensor], group: int) -> None:
        super().__init__()
        self.sensitivity, self.group = sensitivity, group
        self.seen: set[int] = set()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for x in (key_states, value_states):
            # No parameter asks for gradients, so the graph begins at the first keys and values.
            if not x.requires_grad:
                x.requires_grad_(True)
            x.register_hook(partial(self._take, layer_idx, x.detach()))
        return key_states, value_states

    def _take(self, layer: int, x: Tensor, gradient: Tensor) -> None:
        self.seen.add(layer)
        gradient = gradient.float()
        group = fit_group(x.shape[-1], self.group)
        for bits, total in self.sensitivity.items():
            error = decode(*encode(x, bits, group)).sub_(x.float())
            total[layer] += error.mul_(gradient).abs_().sum(dtype=torch.float64).item() / x[0].numel()


def kv_sensitivity(
    model: nn.Module,
    token_batches: Iterable[Int[Tensor, "batch tokens"]],
    bits: Sequence[int] = (8, 4, 2),
    *,
    group: int = 128,
    position_scale: int = 1,
    progress: Progress = silent,
) -> dict[int, Float[Tensor, "layers"]]:
    """To first order, how much the loss would move if one layer's keys and values were rounded.

    s = mean |G_K ⊙ (K − Q(K))| + mean |G_V ⊙ (V − Q(V))|, with K after the rotary embedding, and the gradients G of
    the mean next-token loss of one sequence; then the mean over sequences. One forward and one backward pass a batch.
    Gradients are used as they come and not kept; logits are made a few positions at a time.

    Args:
        model: a causal transformers model. It is left as it was.
        token_batches: token ids; sequences of a batch are judged as if each came alone.
        bits: the widths to judge.
        group: entries of a head that share a scale.
        position_scale: tokens stand at positions 0, s, 2s, …: short batches then show keys as they are far out.
        progress: called after every batch.

    Returns:
        For each width, one number a layer, in nats a token, float64.

    Raises:
        InputError: no batches, not token ids, or positions beyond the model's.
        NotApplicable: the model predicts no next token, or keeps its keys from the cache.

    Source:
        arXiv 2505.18610, block-wise memory allocation and positional interpolation.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from assay.compress import kv_sensitivity
        >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2)
        >>> found = kv_sensitivity(LlamaForCausalLM(config), [torch.arange(48).view(2, 24)])
        >>> {b: len(s) for b, s in found.items()}, bool((found[2] > found[8]).all())
        ({8: 2, 4: 2, 2: 2}, True)
    """
    found = anatomy(model)
    require_causal(found)
    for b in bits:
        if not isinstance(b, int) or isinstance(b, bool) or not 1 <= b <= 16:
            raise InputError(f"bits has {b!r}: use whole numbers from 1 to 16")
    if not bits:
        raise InputError("bits is empty: name at least one width")
    inputs = _inputs(found, token_batches, position_scale)
    sensitivity = {b: torch.zeros(found.n_layers, dtype=torch.float64) for b in bits}
    with _frozen(model):
        for done, batch in enumerate(inputs, start=1):
            probe = _Probe(sensitivity, group)
            _backward(found, batch, probe)
            if len(probe.seen) < found.n_layers:
                missing = min(set(range(found.n_layers)) - probe.seen)
                raise NotApplicable(f"layer {missing} hands its keys to no cache, so their gradients cannot be read")
            progress(done, len(inputs), "calibration batches")
    n = sum(len(batch["input_ids"]) for batch in inputs)
    return {b: total / n for b, total in sensitivity.items()}


def _backward(found: Anatomy, batch: dict[str, Tensor], probe: _Probe) -> None:
    """Gradients of the sum over sequences of their mean loss."""
    ids = batch["input_ids"]
    name = "cache" if "cache" in inspect.signature(found.backbone.forward).parameters else "past_key_values"
    with torch.enable_grad():
        hidden = found.backbone(**batch, **{name: probe}, use_cache=True)[0]
        leaf = hidden.detach().requires_grad_(True)
        rows = max(1, _LOGITS_BYTES // (4 * len(ids) * (found.vocab_size or 1)))
        for start in range(0, ids.shape[1] - 1, rows):
            targets = ids[:, start + 1 : start + rows + 1]
            logits = found.logits(leaf[:, start : start + targets.shape[1]]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / (ids.shape[1] - 1)).backward()
        hidden.backward(leaf.grad)


# ---- allocation --------------------------------------------------------------------------------------------------


def allocate_bits(
    sensitivity: Mapping[int, Float[Tensor, "layers"]], bytes_a_layer: Mapping[int, int], budget_bytes: float
) -> tuple[int, ...]:
    """One width a layer, of least total sensitivity within a budget: a multiple-choice knapsack, solved exactly.

    Args:
        sensitivity: for each width, one number a layer (`kv_sensitivity`).
        bytes_a_layer: what a layer takes at each of the widths to choose from (`layer_bytes`).
        budget_bytes: for all layers together.

    Returns:
        The widths, in bits.

    Raises:
        InputError: widths without sensitivities, sensitivities that are not finite or not of one length, or a budget
            below what the smallest widths take.

    Source:
        arXiv 2505.18610, block-wise memory allocation.

    Example:
        >>> import torch
        >>> from assay.compress import allocate_bits
        >>> allocate_bits({2: torch.tensor([9.0, 1.0, 5.0]), 4: torch.tensor([1.0, 0.5, 1.0])}, {2: 10, 4: 20}, 50)
        (4, 2, 4)
    """
    widths = sorted(bytes_a_layer)
    missing = [b for b in widths if b not in sensitivity]
    if not widths or missing:
        raise InputError(f"bytes_a_layer names {widths}: give at least one width, each with its sensitivity")
    rows = [torch.as_tensor(sensitivity[b], dtype=torch.float64).cpu().numpy() for b in widths]
    if len({r.shape for r in rows}) > 1 or rows[0].ndim != 1 or not rows[0].size:
        raise InputError("sensitivity differs in length between widths, or is empty: give one number a layer")
    cost = np.stack(rows, axis=1)
    if not np.isfinite(cost).all():
        raise InputError("sensitivity is not finite everywhere: look for NaN or infinity in the model's gradients")
    size = [math.ceil(bytes_a_layer[b]) for b in widths]
    n_layers, least = len(cost), min(size)
    if math.isnan(budget_bytes) or budget_bytes < n_layers * least:
        raise InputError(
            f"the budget is {budget_bytes:,.0f} bytes and {n_layers} layers at {widths[size.index(least)]} bits take "
            f"{n_layers * least:,}: give more bytes, fewer tokens or a smaller width"
        )
    # In steps between the sizes, so that the solver sees small whole numbers and its tolerances cannot matter.
    step = math.gcd(*(s - least for s in size)) or 1
    steps = np.array([(s - least) // step for s in size], dtype=float)
    room = (min(budget_bytes, n_layers * max(size)) - n_layers * least) // step
    above = cost - cost.min(axis=1, keepdims=True)
    above = above / (above.max() or 1.0)
    each = np.kron(np.eye(n_layers), np.ones(len(widths)))
    solved = milp(
        above.ravel(),
        integrality=np.ones(above.size),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(each, 1, 1), LinearConstraint(np.tile(steps, n_layers)[None], -np.inf, room)],
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        raise InputError(f"the allocation was not solved: {solved.message}")
    chosen = solved.x.reshape(n_layers, len(widths)).argmax(axis=1)
    return tuple(widths[i] for i in chosen)


# ---- from keys to queries ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SmoothingResult(Result):
    """What was moved from keys to queries.

    Attributes:
        factors: per layer, what each key dimension was divided by and its query dimensions multiplied by,
            [kv_heads, head_dim].
        alphas: per layer, the power α of the largest key that was best; 0 where no move helped.
        error_before: per layer, the mean squared error of the attention's output with keys and values of 4 bits, as the
            model was.
        error_after: the same with the chosen α.
    """

    factors: tuple[Float[Tensor, "kv_heads head_dim"], ...]
    alphas: tuple[float, ...]
    error_before: tuple[float, ...]
    error_after: tuple[float, ...]

    def table(self) -> Table:
        """One row a layer."""
        columns = (
            Column("layer"),
            Column("alpha", about="power of the largest key"),
            Column("largest factor", "", "the most that a key dimension was divided by, over the least"),
            Column("error before", "", "mean squared error of the attention's output at 4 bits"),
            Column("error after", "", "the same after the move"),
        )
        rows = tuple(
            (layer, alpha, float(factor.max() / factor.min()), before, after)
            for layer, (factor, alpha, before, after) in enumerate(
                zip(self.factors, self.alphas, self.error_before, self.error_after, strict=True)
            )
        )
        return Table(columns, rows, "Outliers moved from keys to queries")

    def figure(self) -> Figure:
        """The error of each layer's attention, before and after."""
        from plotly import graph_objects as go

        layers = list(range(len(self.alphas)))
        figure = go.Figure(
            [
                go.Scatter(x=layers, y=self.error_before, name="before", mode="lines+markers"),
                go.Scatter(x=layers, y=self.error_after, name="after", mode="lines+markers"),
            ]
        )
        figure.update_layout(xaxis_title="layer", yaxis_title="squared error of the attention's output")
        figure.update_yaxes(type="log")
        return figure


class _Largest(Reducer):
    """The largest magnitude of each key dimension after the rotary embedding."""

    sites = ("attn",)

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}

    def update(self, site: str, layer: int, value: AttentionView, batch: Batch) -> None:
        most = value.k.abs().amax(dim=(0, 2)).float()
        # Some models repeat their keys for the query heads before they multiply.
        most = most.unflatten(0, (value.block.attention.n_kv_heads, -1)).amax(dim=1)
        self.values[layer] = torch.maximum(most, self.values.get(layer, most))


class _Search(Reducer):
    """The error of each layer's attention output for every candidate, keys and values rounded."""

    sites = ("attn",)

    def __init__(self, factors: dict[int, Float[Tensor, "candidates kv_heads head_dim"]], group: int) -> None:
        self.factors, self.group = factors, group
        self.squared = {layer: torch.zeros(len(f), dtype=torch.float64) for layer, f in factors.items()}
        self.count = 0

    def update(self, site: str, layer: int, value: AttentionView, batch: Batch) -> None:
        q, k, v, attention = value.q.float(), value.k.float(), value.v.float(), value.block.attention
        mask = value.mask if value.mask is None or value.mask.dtype == torch.bool else value.mask.float()
        rounded = partial(self._rounded, bits=_SEARCH_BITS)
        values = rounded(v)
        weight = attention.o.weight.float()
        for i, factor in enumerate(self.factors[layer]):
            by_query, by_key = (
                factor.repeat_interleave(x.shape[1] // len(factor), dim=0)[None, :, None] for x in (q, k)
            )
            out = F.scaled_dot_product_attention(
                q * by_query,
                rounded(k / by_key),
                values,
                mask,
                is_causal=value.causal and mask is None,
                scale=value.scaling,
                enable_gqa=True,
            )
            gap = (out - value.out.float()).transpose(1, 2).flatten(2)
            self.squared[layer][i] += F.linear(gap, weight).square().sum(dtype=torch.float64).cpu()
        if layer == 0:
            self.count += q.shape[0] * q.shape[2] * weight.shape[0]

    def _rounded(self, x: Tensor, bits: int) -> Tensor:
        return decode(*encode(x, bits, fit_group(x.shape[-1], self.group)))


def smooth_keys(
    model: nn.Module,
    token_batches: Iterable[Int[Tensor, "batch tokens"]],
    *,
    position_scale: int = 4,
    grid: int = 20,
    group: int = 128,
    progress: Progress = silent,
) -> tuple[nn.Module, SmoothingResult]:
    """Move the outliers of keys to the queries, where nothing is rounded, by rescaling the projections.

    A key dimension is divided by λ = m^α, with m its largest magnitude on the calibration text, and the query
    dimensions that meet it are multiplied by λ. Dimensions that the rotary embedding turns together share their m, so
    that products of queries and keys stay what they were. α is searched layer by layer: it is the one with the least
    error of the attention's output when keys and values have 4 bits. α = 0, no move, is among the candidates, so that
    no layer gets worse on the calibration text.

    Norms of queries and keys take the factors where there are any, their own weights being the last thing before the
    rotary embedding; heads that share a norm share the factors.

    Args:
        model: a causal transformers model. Its query and key weights (and biases) are changed in place once all
            layers are computed; an error leaves it as it was. In 16 bits, rounding the new weights moves the
            model's outputs by as much as any rounding of them.
        token_batches: token ids.
        position_scale: tokens stand at positions 0, s, 2s, …
        grid: how many powers α: 1/grid, 2/grid, …, 1, and 0.
        group: entries of a head that share a scale.
        progress: called after every batch, of two passes.

    Returns:
        The model, and what was moved.

    Raises:
        InputError: no batches, not token ids, positions beyond the model's, or an option out of range.
        NotApplicable: queries and keys are clamped or their scores soft-capped, their norm does not multiply by its
            weight, or the weights are not plain floating-point ones.

    Source:
        arXiv 2505.18610, calibration; the search over powers is that of AWQ, arXiv 2306.00978.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from assay.compress import smooth_keys
        >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2)
        >>> model, moved = smooth_keys(LlamaForCausalLM(config), [torch.arange(48).view(2, 24)])
        >>> moved.factors[0].shape
        torch.Size([2, 8])
    """
    if not isinstance(grid, int) or isinstance(grid, bool) or grid < 1:
        raise InputError(f"grid is {grid!r}: use a whole number from 1")
    found = anatomy(model)
    require_causal(found)
    for block in found.blocks:
        _check_movable(block.attention, block.index)
    inputs = _inputs(found, token_batches, position_scale)
    largest = _Largest()
    trace(model, inputs, [largest], anatomy=found, total=len(inputs), progress=progress)
    powers = torch.arange(grid + 1) / grid
    candidates = {}
    for block in found.blocks:
        most = _shared(largest.values[block.index], block.attention)
        # A dimension that is always zero has nothing to move.
        most = most.where(most > 0, 1.0)
        candidates[block.index] = most.pow(powers.to(most.device)[:, None, None]).clamp(_LEAST, _MOST)
    search = _Search(candidates, group)
    trace(model, inputs, [search], anatomy=found, total=len(inputs), progress=progress)
    errors = [search.squared[block.index] / search.count for block in found.blocks]
    best = [int(e.argmin()) for e in errors]
    factors = [candidates[block.index][i] for block, i in zip(found.blocks, best, strict=True)]
    _move(found, factors)
    return model, SmoothingResult(
        factors=tuple(f.cpu() for f in factors),
        alphas=tuple(i / grid for i in best),
        error_before=tuple(float(e[0]) for e in errors),
        error_after=tuple(float(e[i]) for e, i in zip(errors, best, strict=True)),
    )


def _check_movable(attention: Attention, layer: int) -> None:
    if attention.clip is not None:
        raise NotApplicable(f"layer {layer} clamps its queries and keys, so none can be scaled: leave smoothing out")
    if attention.softcap is not None:
        raise NotApplicable(
            f"layer {layer} soft-caps its scores, which the search does not follow: leave smoothing out"
        )
    for norm, projection in ((attention.q_norm, attention.q), (attention.k_norm, attention.k)):
        module = projection.module if norm is None else norm
        weight = module._parameters.get("weight")
        if weight is None or not weight.dtype.is_floating_point:
            raise NotApplicable(
                f"{type(module).__name__} in layer {layer} has no floating-point weight to scale: smooth the keys "
                "before the weights are quantised"
            )
        if norm is not None:
            probe = copy.deepcopy(norm)
            nn.init.zeros_(probe.get_parameter("weight"))
            if bool(probe(weight.detach() + 1).any()):
                raise NotApplicable(
                    f"the {type(norm).__name__} of layer {layer} does not multiply by its weight: leave smoothing out"
                )


def _shared(most: Float[Tensor, "kv_heads head_dim"], attention: Attention) -> Float[Tensor, "kv_heads head_dim"]:
    """The largest of what must share a factor."""
    most = most.clone()
    if attention.rotary is not None:
        pairs = attention.rotary.pairs.to(most.device)
        most[:, pairs] = most[:, pairs].amax(dim=-1, keepdim=True).expand(-1, -1, 2)
    norms = [n for n in (attention.q_norm, attention.k_norm) if n is not None]
    if any(n.get_parameter("weight").numel() == attention.head_dim for n in norms):
        most = most.amax(dim=0, keepdim=True).expand_as(most).clone()
    return most


@torch.no_grad()
def _move(found: Anatomy, factors: Sequence[Float[Tensor, "kv_heads head_dim"]]) -> None:
    """Scale what makes keys and queries: everything is computed, then everything is swapped."""
    rows: dict[nn.Module, tuple[Tensor, bool]] = {}
    for block, factor in zip(found.blocks, factors, strict=True):
        attention = block.attention
        by_query = factor[attention.kv_head.to(factor.device)]
        for projection, norm, scale in (
            (attention.q, attention.q_norm, by_query),
            (attention.k, attention.k_norm, factor.reciprocal()),
        ):
            if norm is not None:
                whole = norm.get_parameter("weight").numel() == scale.numel()
                rows[norm] = (scale.flatten() if whole else scale[0], False)
                continue
            module = projection.module
            width = module.get_parameter("weight").shape[1 if projection.transposed else 0]
            scaled, _ = rows.setdefault(module, (scale.new_ones(width), projection.transposed))
            scaled[slice(None) if projection.rows is None else projection.rows] = scale.flatten()
    new: list[tuple[nn.Parameter, Tensor]] = []
    for module, (scale, transposed) in rows.items():
        for name, old in module.named_parameters(recurse=False):
            by = scale[:, None] if old.ndim == 2 and not transposed else scale
            by = by.to(old.device)
            value = old.float().mul(by).to(old.dtype)
            if not bool(torch.isfinite(value).all()):
                raise InputError(f"{name} of a {type(module).__name__} would leave the range of {old.dtype}")
            new.append((old, value))
    for parameter, value in new:
        parameter.copy_(value)


# ---- all of it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PmKvqResult(Result):
    """What a model's cache will be.

    Attributes:
        bits: the width that each layer's cache will have in the end.
        budgets: bytes that each layer may take for one sequence.
        budget_bytes: bytes that were asked for, all layers together.
        total_bytes: bytes that `max_tokens` tokens take at the end.
        full_bytes: bytes that they would take at 16 bits without constants.
        max_tokens: the length of a sequence that the budgets hold.
        sensitivity: for each width to choose from, one number a layer, in nats a token.
        smoothing: what was moved from keys to queries, None where nothing was to be.
        options: the cache's `sink`, `window`, `group` and `count_scales`.
    """

    bits: tuple[int, ...]
    budgets: tuple[int, ...]
    budget_bytes: float
    total_bytes: int
    full_bytes: int
    max_tokens: int
    sensitivity: dict[int, Float[Tensor, "layers"]]
    smoothing: SmoothingResult | None
    options: dict[str, Any] = field(repr=False)

    def cache(self, config: Any) -> ProgressiveKVCache:
        """A new, empty cache for `generate`.

        Args:
            config: the model's configuration.
        """
        return ProgressiveKVCache(config, self.budgets, min_bits=min(self.bits), **self.options)

    def table(self) -> Table:
        """One row a layer."""
        widths = sorted(self.sensitivity)
        columns = (
            Column("layer"),
            Column("bits", about="the last width of the cache"),
            Column("budget", "bytes", "for one sequence"),
            *(Column(f"sensitivity at {b} bits", "nat/token", "first-order change of the loss") for b in widths),
            Column("alpha", about="power of the largest key that was moved to the queries"),
        )
        alphas = self.smoothing.alphas if self.smoothing else [None] * len(self.bits)
        rows = tuple(
            (layer, b, budget, *(float(self.sensitivity[w][layer]) for w in widths), alpha)
            for layer, (b, budget, alpha) in enumerate(zip(self.bits, self.budgets, alphas, strict=True))
        )
        title = (
            f"{self.max_tokens:,} tokens in {self.total_bytes / 2**20:.2f} MiB "
            f"({self.full_bytes / 2**20:.2f} MiB at 16 bits)"
        )
        return Table(columns, rows, title)

    def figure(self) -> Figure:
        """Sensitivities and chosen widths by layer."""
        from plotly import graph_objects as go
        from plotly.subplots import make_subplots

        figure: Figure = make_subplots(specs=[[{"secondary_y": True}]])
        layers = list(range(len(self.bits)))
        figure.add_trace(go.Bar(x=layers, y=self.bits, name="bits", opacity=0.4), secondary_y=True)
        for width, values in sorted(self.sensitivity.items()):
            line = go.Scatter(x=layers, y=values.tolist(), name=f"sensitivity at {width} bits", mode="lines+markers")
            figure.add_trace(line)
        figure.update_xaxes(title_text="layer")
        figure.update_yaxes(title_text="sensitivity (nat/token)", type="log", secondary_y=False)
        figure.update_yaxes(title_text="bits", secondary_y=True)
        return figure


def pm_kvq(
    model: nn.Module,
    token_batches: Iterable[Int[Tensor, "batch tokens"]],
    *,
    max_tokens: int,
    budget_bytes: float,
    choices: Sequence[int] = (2, 4),
    smooth: bool = True,
    position_scale: int = 4,
    sink: int = 1,
    window: int = 128,
    group: int = 128,
    count_scales: bool = True,
    progress: Progress = silent,
) -> tuple[nn.Module, PmKvqResult]:
    """Prepare a model for a small key-value cache: keys without outliers, and a width for each layer.

    Args:
        model: a causal transformers model. With `smooth`, its query and key weights are changed in place; an error
            leaves it as it was.
        token_batches: token ids to calibrate on.
        max_tokens: how long a sequence becomes, prompt included.
        budget_bytes: for the cache of one sequence, all layers together.
        choices: the widths that a layer may end with: of 16, 8, 4, 2 and 1.
        smooth: move the outliers of keys to the queries (`smooth_keys`).
        position_scale: calibration tokens stand at positions 0, s, 2s, …
        sink: first tokens that stay at 16 bits.
        window: how many tokens gather at 16 bits.
        group: entries of a head that share a scale.
        count_scales: count scales and zero points in the budget; the paper counts codes alone.
        progress: called after every batch of each pass.

    Returns:
        The model, and the plan; `plan.cache(model.config)` makes a cache for `model.generate(past_key_values=...)`.

    Raises:
        InputError: an option is out of range, or the budget is too small for the smallest width.
        NotApplicable: the model cannot be calibrated, smoothed or cached in this way.

    Source:
        "PM-KVQ: Progressive Mixed-precision KV Cache Quantization for Long-CoT LLMs", arXiv 2505.18610.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from assay.compress import layer_bytes, pm_kvq
        >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2)
        >>> room = layer_bytes(config, 200, 4, window=16) + layer_bytes(config, 200, 2, window=16)
        >>> model, plan = pm_kvq(LlamaForCausalLM(config), [torch.arange(48).view(2, 24)], max_tokens=200,
        ...     budget_bytes=room, window=16)
        >>> sorted(plan.bits), plan.cache(model.config).capacity >= 200
        ([2, 4], True)
    """
    choices = tuple(choices)
    if not choices or not all(b in WIDTHS for b in choices):
        raise InputError(f"choices is {choices!r}: name widths of 16, 8, 4, 2 and 1 bits")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise InputError(f"max_tokens is {max_tokens!r}: use a whole number from 1")
    found = anatomy(model)
    options: dict[str, Any] = {"sink": sink, "window": window, "group": group, "count_scales": count_scales}
    # What the cache refuses is told before any calibration.
    ProgressiveKVCache(model.config, [math.inf] * found.n_layers, **options)
    sizes = {b: layer_bytes(model.config, max_tokens, b, **options) for b in choices}
    allocate_bits({b: torch.zeros(found.n_layers) for b in choices}, sizes, budget_bytes)
    batches = list(token_batches)
    before = [(p, p.detach().clone()) for a in found.blocks for p in _makers(a.attention)] if smooth else []
    try:
        smoothing = None
        if smooth:
            _, smoothing = smooth_keys(model, batches, position_scale=position_scale, group=group, progress=progress)
        sensitivity = kv_sensitivity(
            model, batches, choices, group=group, position_scale=position_scale, progress=progress
        )
        bits = allocate_bits(sensitivity, sizes, budget_bytes)
    except BaseException:
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)
        raise
    # A layer needs room for the sink and the window even where a sequence is shorter than they are.
    least = layer_bytes(model.config, sink + window, 16, **options)
    full = layer_bytes(model.config, max_tokens, 16, **{**options, "count_scales": False})
    return model, PmKvqResult(
        bits=bits,
        budgets=tuple(max(sizes[b], least) for b in bits),
        budget_bytes=budget_bytes,
        total_bytes=sum(sizes[b] for b in bits),
        full_bytes=full * found.n_layers,
        max_tokens=max_tokens,
        sensitivity=sensitivity,
        smoothing=smoothing,
        options=options,
    )


def _makers(attention: Attention) -> list[nn.Parameter]:
    """The parameters that a move of outliers changes."""
    modules = [attention.q.module, attention.k.module, attention.q_norm, attention.k_norm]
    return [p for m in modules if m is not None for p in m.parameters(recurse=False)]
