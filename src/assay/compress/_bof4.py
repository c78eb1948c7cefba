"""BOF4: 4-bit block-wise quantisation with levels that are optimal for the block size, and its baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import ndtr, ndtri
from torch import Tensor, nn

from assay.compress._blockwise import (
    Codebook,
    QTensor,
    QuantizedLinear,
    check_block_size,
    distance,
    linear_layers,
    matrix,
    quantize,
    swap,
)
from assay.core.errors import InputError, NotApplicable
from assay.core.results import Column, Result, Table, jsonable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "Bof4Result",
    "Codebook",
    "LayerError",
    "QTensor",
    "QuantizedLinear",
    "af4_codebook",
    "bof4",
    "nf4_codebook",
    "quantize",
    "quantize_module",
    "rtn_codebook",
    "solve_codebook",
]

Criterion = Literal["mse", "mae"]
Array = np.ndarray
# From cell edges [levels + 1] and the present levels to each cell's best level; NaN for an empty cell.
Centroids = Callable[[Array, Array], Array]

_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_ZERO = 7


# ---- levels ------------------------------------------------------------------------------------------------------


def solve_codebook(
    block_size: int = 64,
    signed: bool = True,
    criterion: Criterion = "mse",
    data: Float[Tensor, "..."] | Literal["gaussian"] = "gaussian",
    *,
    fixed: Sequence[float] | None = None,
    levels: int = 16,
) -> Codebook:
    """The levels with the least error of the original weights, for blocks of a given size.

    Each level is the centroid of its cell, weighted by the block's scale m, because (ŵ − w)² = m² (x̂ − x)²: the
    m²-weighted mean for "mse", the |m|-weighted median for "mae". 0 and +1 are kept as levels, and −1 too if not
    `signed`. For Gaussian weights the sums are integrals over the law of m (Gauss–Legendre; the moments of the
    other weights, truncated normals, in closed form), so the levels are deterministic and carry no sampling noise.

    Args:
        block_size: weights that share a scale.
        signed: divide a block by its largest weight with its sign (BOF4-S), which frees the level −1, instead of
            by its magnitude (BOF4).
        criterion: "mse" or "mae".
        data: "gaussian", or your own weights, of any shape: their empirical distribution then takes the place of
            the Gaussian. Worth it for heavy-tailed weights.
        fixed: the levels that do not move; by default 0 and 1, and −1 too if not `signed`. The ends at which the
            largest weight of a block stands must be among them: 1, and −1 if not `signed`.
        levels: how many, 2 to 16, the fixed ones included. A code takes 4 bits whatever their number.

    Returns:
        The codebook.

    Raises:
        InputError: an option is out of range; the data are not floating, not finite, or all zero.

    Source:
        "Improving Block-Wise LLM Quantization by 4-bit Block-Wise Optimal Float (BOF4)", arXiv 2505.06653,
        Eqs. 5–8 and Table 7.

    Example:
        >>> from assay.compress import solve_codebook
        >>> book = solve_codebook(block_size=32)
        >>> round(book.levels[0], 4), book.levels[7], book.levels[15]
        (-0.8733, 0.0, 1.0)
    """
    check_block_size(block_size)
    if criterion not in ("mse", "mae"):
        raise InputError(f'criterion is {criterion!r}: use "mse" or "mae"')
    if not isinstance(levels, int) or isinstance(levels, bool) or not 2 <= levels <= 16:
        raise InputError(f"levels is {levels!r}: 4 bits hold a whole number from 2 to 16")
    kept = _kept(fixed, signed, levels)
    if isinstance(data, str):
        if data != "gaussian":
            raise InputError(f'data is {data!r}: use "gaussian" or a tensor of weights')
        solved = _gaussian_levels(block_size, signed, criterion, kept, levels)
    else:
        centroids = _sample_centroids(data, block_size, signed, criterion)
        solved = _lloyd(centroids, *_start(signed, kept, levels))
    source = "" if isinstance(data, str) else ", from data"
    number = "" if levels == 16 else f", {levels} levels"
    name = f"BOF4{'-S' if signed else ''} ({criterion.upper()}{source}{number})"
    return Codebook(solved, "signed" if signed else "absmax", name)


def nf4_codebook() -> Codebook:
    """The levels of NF4 (QLoRA): quantiles of a normal distribution, the same for every block size.

    Source:
        "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314.

    Example:
        >>> from assay.compress import nf4_codebook
        >>> len(nf4_codebook().levels)
        16
    """
    return Codebook(_NF4, "absmax", "NF4")


def af4_codebook(block_size: int = 64, *, zero_aware: bool = False) -> Codebook:
    """The levels of AF4: least absolute error of the normalised weights, with −1, 0 and 1 kept.

    The published levels are those of a code without the zero on each side, to which zero was then added: they are
    reproduced to all their digits by cells of the two levels next to zero that reach as far as zero. With
    `zero_aware` these cells end half-way, as cells do, which makes the levels a true optimum of the criterion; it
    has less error of both kinds.

    Args:
        block_size: weights that share a scale.
        zero_aware: solve with the zero in place rather than as published.

    Raises:
        InputError: the block size is out of range.

    Source:
        "NF4 Isn't Information Theoretically Optimal (and that's Good)", arXiv 2306.06965.

    Example:
        >>> from assay.compress import af4_codebook
        >>> [round(v, 4) for v in af4_codebook(64).levels[5:9]]
        [-0.1498, -0.0493, 0.0, 0.0427]
    """
    check_block_size(block_size)
    return Codebook(_af4_levels(block_size, zero_aware), "absmax", "AF4 (zero-aware)" if zero_aware else "AF4")


def rtn_codebook(kind: Literal["signed", "absmax", "minmax"] = "signed") -> Codebook:
    """The evenly spaced levels of rounding to nearest.

    Args:
        kind: "signed": steps of 1/8 up to the weight of largest magnitude with its sign, all 16 levels in use (as
            llama.cpp's Q4_0); "absmax": the 15 symmetric levels −7/7 … 7/7; "minmax": 16 levels over the block's
            range, at the price of a second constant (as Q4_1, and as asymmetric round-to-nearest elsewhere).

    Raises:
        InputError: there is no such kind.

    Example:
        >>> from assay.compress import rtn_codebook
        >>> rtn_codebook("signed").levels[:2]
        (-0.875, -0.75)
    """
    if kind == "signed":
        return Codebook(tuple(k / 8 for k in range(-7, 9)), "signed", "RTN (signed)")
    if kind == "absmax":
        return Codebook(tuple(k / 7 for k in range(-7, 8)), "absmax", "RTN (absmax)")
    if kind == "minmax":
        return Codebook(tuple(k / 15 for k in range(16)), "minmax", "RTN (min/max)")
    raise InputError(f'kind of rounding is {kind!r}: use "signed", "absmax" or "minmax"')


def _kept(fixed: Sequence[float] | None, signed: bool, levels: int) -> tuple[float, ...]:
    """The levels that do not move, ascending."""
    ends = (1.0,) if signed else (-1.0, 1.0)
    if fixed is None:
        return tuple(sorted((*ends, 0.0)[:levels]))
    try:
        kept = tuple(sorted(map(float, fixed)))
    except (TypeError, ValueError):
        kept = ()
    if not all(-1 <= v <= 1 for v in kept) or len(set(kept)) < len(kept) or not set(ends) <= set(kept):
        raise InputError(
            f"fixed is {fixed!r}: give different levels from -1 to 1, among them "
            f"{' and '.join(f'{e:g}' for e in ends)}, where the largest weight of a block stands"
        )
    if len(kept) > levels:
        raise InputError(f"fixed has {len(kept)} levels and levels is {levels}: give at least as many levels")
    return kept


def _start(signed: bool, fixed: tuple[float, ...], n_levels: int) -> tuple[Array, list[int]]:
    """Levels to start from, NF4's thinned to their number and the nearest ones put on the fixed, and where those are."""
    nf4 = np.array(_NF4)
    if signed:
        nf4[0] = -0.87
    free = np.interp(np.linspace(0, 15, n_levels), np.arange(16), nf4)
    for value in fixed:
        free = np.delete(free, np.abs(free - value).argmin())
    levels = np.sort(np.concatenate([free, fixed]))
    return levels, np.searchsorted(levels, fixed).tolist()


def _lloyd(
    centroids: Centroids, levels: Array, fixed: list[int], *, tolerance: float = 1e-9, max_steps: int = 20_000
) -> tuple[float, ...]:
    """Moves levels to their cells' centroids until they stay."""
    kept = levels[fixed]
    for _ in range(max_steps):
        edges = np.concatenate([[-1.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
        new = centroids(edges, levels)
        new = np.where(np.isnan(new), levels, new)
        new[fixed] = kept
        change = np.abs(new - levels).max()
        levels = new
        if change < tolerance:
            break
    return tuple(levels.tolist())


@cache
def _gaussian_levels(
    block_size: int, signed: bool, criterion: Criterion, fixed: tuple[float, ...], n_levels: int
) -> tuple[float, ...]:
    law = _NormalisedGaussian(block_size, power=2 if criterion == "mse" else 1)
    return _lloyd(law.means if criterion == "mse" else law.medians, *_start(signed, fixed, n_levels))


@cache
def _af4_levels(block_size: int, zero_aware: bool) -> tuple[float, ...]:
    law = _NormalisedGaussian(block_size, power=0)

    def centroids(edges: Array, levels: Array) -> Array:
        if zero_aware:
            return law.medians(edges, levels)
        below, above = edges.copy(), edges.copy()
        below[_ZERO] = above[_ZERO + 1] = 0.0
        return np.concatenate([law.medians(below, levels)[:_ZERO], law.medians(above, levels)[_ZERO:]])

    return _lloyd(centroids, *_start(False, (-1.0, 0.0, 1.0), 16))


class _NormalisedGaussian:
    """The law of x = w/m for a weight of a Gaussian block that is not the largest, weighted by m^power.

    Given m, the other weights are independent normals truncated to [−m, m]; the weight at the end of the range
    belongs to a level that does not move. The density of m over the truncation's mass is
    p(m) / (2Φ(m) − 1) = I (2Φ(m) − 1)^(I − 2) · 2φ(m).
    """

    def __init__(self, block_size: int, power: int, n_nodes: int = 160) -> None:
        # Where the distribution function of m, (2Φ(m) − 1)^I, leaves 0 and reaches 1 in double precision.
        low = float(ndtri((1 + 1e-18 ** (1 / block_size)) / 2))
        high = -float(ndtri(1e-18 / (2 * block_size)))
        nodes, weights = np.polynomial.legendre.leggauss(n_nodes)
        self.m = low + (high - low) * (nodes + 1) / 2
        density = (2 * ndtr(self.m) - 1) ** (block_size - 2) * _phi(self.m)
        self.weight = weights * density * self.m**power
        self.weight /= self.weight.sum()

    def _mass(self, x: Array) -> Array:
        return np.asarray(ndtr(x[:, None] * self.m) @ self.weight)

    def means(self, edges: Array, levels: Array) -> Array:
        first = -_phi(edges[:, None] * self.m) @ (self.weight / self.m)
        return np.asarray(np.diff(first) / np.diff(self._mass(edges)))

    def medians(self, edges: Array, levels: Array) -> Array:
        mass = self._mass(edges)
        target = (mass[1:] + mass[:-1]) / 2
        x: Array = np.clip(levels, edges[:-1], edges[1:])
        # The mass is nearly linear within a cell: Newton's steps, held inside it, reach rounding error in a few.
        for _ in range(5):
            slope = _phi(x[:, None] * self.m) @ (self.weight * self.m)
            x = np.clip(x - (self._mass(x) - target) / slope, edges[:-1], edges[1:])
        return x


def _phi(x: Array) -> Array:
    return np.asarray(np.exp(-x * x / 2) / np.sqrt(2 * np.pi))


def _sample_centroids(data: Tensor, block_size: int, signed: bool, criterion: Criterion) -> Centroids:
    """Centroids over given weights: sorted once, every cell is then a difference of two running sums."""
    if not isinstance(data, Tensor) or not data.dtype.is_floating_point:
        raise InputError(f"data is {getattr(data, 'dtype', type(data).__name__)}: pass floating-point weights")
    flat = data.detach().reshape(-1).double()
    bad = flat.numel() - int(torch.isfinite(flat).sum())
    if bad:
        raise InputError(f"data has {bad} non-finite entries: repair them first")
    blocks = nn.functional.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    scale = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) if blocks.numel() else blocks[:, :1]
    blocks, scale = blocks[scale[:, 0] != 0], scale[scale[:, 0] != 0]
    if not blocks.numel():
        raise InputError("data has no weight other than zero: there is nothing to fit levels to")
    values, order = (blocks / (scale if signed else scale.abs())).view(-1).sort()
    weight = scale.abs().expand_as(blocks).reshape(-1)[order]
    if criterion == "mse":
        weight = weight.square()
    x = values.cpu().numpy()
    mass = np.concatenate([[0.0], weight.cumsum(0).cpu().numpy()])
    first = np.concatenate([[0.0], (weight * values).cumsum(0).cpu().numpy()])

    def cuts(edges: Array) -> Array:
        at = np.searchsorted(x, edges, side="right")
        at[0], at[-1] = 0, x.size
        return at

    def means(edges: Array, levels: Array) -> Array:
        at = cuts(edges)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.diff(first[at]) / np.diff(mass[at]))

    def medians(edges: Array, levels: Array) -> Array:
        at = cuts(edges)
        middle = np.searchsorted(mass, (mass[at[1:]] + mass[at[:-1]]) / 2, side="left") - 1
        return np.where(np.diff(at) > 0, x[np.clip(middle, 0, x.size - 1)], np.nan)

    return means if criterion == "mse" else medians


# ---- rewriting ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerError:
    """What 4 bits cost one tensor.

    Attributes:
        name: the layer's name in the model; "weight" for a bare tensor.
        shape: the weight's shape.
        mse: mean of (ŵ − w)² over the weights, in squared units of the weights.
        mae: mean of |ŵ − w|, in units of the weights.
        relative_error: Σ (ŵ − w)² / Σ w², no unit; 0 for an all-zero weight.
        bits_per_weight: stored bits over weights, constants and outliers included.
        n_outliers: weights kept in 16 bits.
    """

    name: str
    shape: tuple[int, ...]
    mse: float
    mae: float
    relative_error: float
    bits_per_weight: float
    n_outliers: int

    @property
    def n_weights(self) -> int:
        """How many weights the tensor has."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Bof4Result(Result):
    """What quantisation cost, layer by layer and in total.

    Errors are over all weights of a tensor, outliers included, of the weights as they decode (with the constants
    as stored) against the given ones.

    Attributes:
        layers: one entry per packed tensor.
        left: the linear layers that were left as they were, with the reason.
        codebook: the levels used.
        block_size: weights per block.
        opq: the quantile beyond which weights were kept in 16 bits, or None.
        kept_parameters: parameters of the model that are not packed (embeddings, norms, biases, what was left).
    """

    layers: tuple[LayerError, ...]
    left: dict[str, str]
    codebook: Codebook
    block_size: int
    opq: float | None
    kept_parameters: int

    def _mean(self, name: str) -> float:
        sizes = np.array([layer.n_weights for layer in self.layers], dtype=float)
        return float(np.average([getattr(layer, name) for layer in self.layers], weights=sizes))

    @property
    def mse(self) -> float:
        """Mean squared error over all packed weights."""
        return self._mean("mse")

    @property
    def mae(self) -> float:
        """Mean absolute error over all packed weights."""
        return self._mean("mae")

    @property
    def relative_error(self) -> float:
        """Σ (ŵ − w)² / Σ w² over all packed weights."""
        squared = sum(layer.mse * layer.n_weights for layer in self.layers)
        energy = sum(
            layer.mse * layer.n_weights / layer.relative_error for layer in self.layers if layer.relative_error
        )
        return squared / energy if energy else 0.0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over all packed weights."""
        return self._mean("bits_per_weight")

    @property
    def n_outliers(self) -> int:
        """Weights kept in 16 bits, in all layers."""
        return sum(layer.n_outliers for layer in self.layers)

    @property
    def n_weights(self) -> int:
        """Packed weights, in all layers."""
        return sum(layer.n_weights for layer in self.layers)

    def table(self) -> Table:
        """One row per layer, and the total."""
        columns = (
            Column("layer"),
            Column("weights", about="how many"),
            Column("relative error", about="sum of squared errors over sum of squares"),
            Column("MSE", "weight²"),
            Column("MAE", "weight"),
            Column("bits per weight", "bit"),
            Column("outliers", about="weights kept in 16 bits"),
        )
        rows = [
            (
                layer.name,
                layer.n_weights,
                layer.relative_error,
                layer.mse,
                layer.mae,
                layer.bits_per_weight,
                layer.n_outliers,
            )
            for layer in self.layers
        ]
        rows.append(
            (
                "total",
                self.n_weights,
                self.relative_error,
                self.mse,
                self.mae,
                self.bits_per_weight,
                self.n_outliers,
            )
        )
        title = f"{self.codebook.name}, blocks of {self.block_size}" + (f", OPQ {self.opq}" if self.opq else "")
        return Table(columns, tuple(rows), title)

    def figure(self) -> Figure:
        """Relative error of each layer, with the bits it takes."""
        import plotly.graph_objects as go

        names = [layer.name for layer in self.layers]
        figure = go.Figure(
            go.Bar(
                x=[layer.relative_error for layer in self.layers],
                y=names,
                orientation="h",
                customdata=[(layer.bits_per_weight, layer.n_outliers) for layer in self.layers],
                hovertemplate="%{y}<br>relative error %{x:.4g}<br>%{customdata[0]:.3f} bits per weight, "
                "%{customdata[1]} outliers<extra></extra>",
            )
        )
        figure.add_vline(x=self.relative_error, line_dash="dash", annotation_text="all layers")
        figure.update_layout(
            title=f"Weight error in {self.bits_per_weight:.2f} bits, {self.codebook.name}",
            xaxis_title="relative squared error of the weights",
            yaxis={"autorange": "reversed"},
            height=max(300, 120 + 18 * len(names)),
        )
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: the fields and the totals."""
        totals = ("mse", "mae", "relative_error", "bits_per_weight", "n_outliers", "n_weights")
        return super().to_dict() | {"total": {name: jsonable(getattr(self, name)) for name in totals}}


def _measure(name: str, weight: Tensor, packed: QTensor) -> LayerError:
    gap = distance(weight, packed)
    n = packed.n_weights
    return LayerError(
        name=name,
        shape=tuple(packed.shape),
        mse=gap.squared / n,
        mae=gap.absolute / n,
        relative_error=gap.squared / gap.energy if gap.energy else 0.0,
        bits_per_weight=packed.bits_per_weight,
        n_outliers=packed.n_outliers,
    )


def _given(codebook: object) -> Codebook | None:
    if codebook is None or isinstance(codebook, Codebook):
        return codebook
    raise InputError(
        f"codebook is {type(codebook).__name__}: pass a Codebook, such as nf4_codebook(), or None for BOF4's levels"
    )


def quantize_module(
    model: nn.Module,
    codebook: Codebook | None = None,
    *,
    block_size: int = 64,
    opq: float | None = 0.95,
    skip: Iterable[str] = ("lm_head",),
    scale_dtype: torch.dtype = torch.bfloat16,
) -> nn.Module:
    """Replaces a model's linear layers by 4-bit ones; `bof4` does the same and reports the error.

    Args:
        model: changed in place, after everything has been computed.
        codebook: the levels; by default BOF4-S (MSE) for the block size.
        block_size: weights per block.
        opq: see `quantize`.
        skip: layers to leave: a whole name, the name of a part that holds them, or the last piece of a name.
        scale_dtype: see `quantize`.

    Returns:
        The model (a new layer if `model` is itself a linear layer).

    Raises:
        NotApplicable: there is no linear layer to replace.
        InputError: a weight or an option is refused by `quantize`; the model is then unchanged.

    Example:
        >>> import torch
        >>> from assay.compress import quantize_module
        >>> quantize_module(torch.nn.Sequential(torch.nn.Linear(64, 8)))[0]
        QuantizedLinear(in_features=64, out_features=8, bias=True, bits_per_weight=...)
    """
    book = _given(codebook) or solve_codebook(block_size)
    new, _, _ = _packed_layers(model, book, block_size, opq, skip, scale_dtype, measure=False)
    return swap(model, new)


def _packed_layers(
    model: nn.Module,
    codebook: Codebook,
    block_size: int,
    opq: float | None,
    skip: Iterable[str],
    scale_dtype: torch.dtype,
    measure: bool,
) -> tuple[dict[str, nn.Module], list[LayerError], dict[str, str]]:
    taken, left = linear_layers(model, skip)
    if not taken:
        raise NotApplicable(
            f"{type(model).__name__} has no linear layer to quantise ({len(left)} were left by name or shared)"
        )
    new: dict[str, nn.Module] = {}
    errors: list[LayerError] = []
    for name, layer in taken.items():
        weight = matrix(layer)
        try:
            packed = quantize(weight, codebook, block_size, opq, scale_dtype=scale_dtype)
        except InputError as error:
            raise InputError(f"layer {name or type(layer).__name__}: {error}") from None
        new[name] = QuantizedLinear(packed, layer._parameters["bias"]).train(layer.training)
        if measure:
            errors.append(_measure(name or "weight", weight, packed))
    return new, errors, left


@overload
def bof4(
    model_or_weight: Tensor,
    *,
    codebook: Codebook | None = ...,
    block_size: int = ...,
    signed: bool = ...,
    criterion: Criterion = ...,
    opq: float | None = ...,
    skip: Iterable[str] = ...,
    scale_dtype: torch.dtype = ...,
) -> tuple[QTensor, Bof4Result]: ...
@overload
def bof4(
    model_or_weight: nn.Module,
    *,
    codebook: Codebook | None = ...,
    block_size: int = ...,
    signed: bool = ...,
    criterion: Criterion = ...,
    opq: float | None = ...,
    skip: Iterable[str] = ...,
    scale_dtype: torch.dtype = ...,
) -> tuple[nn.Module, Bof4Result]: ...
def bof4(
    model_or_weight: Float[Tensor, "..."] | nn.Module,
    *,
    codebook: Codebook | None = None,
    block_size: int = 64,
    signed: bool = True,
    criterion: Criterion = "mse",
    opq: float | None = 0.95,
    skip: Iterable[str] = ("lm_head",),
    scale_dtype: torch.dtype = torch.bfloat16,
) -> tuple[QTensor | nn.Module, Bof4Result]:
    """Stores weights in 4 bits per weight and one constant per block, with levels optimal for the block size.

    In a module every `nn.Linear` and every `Conv1D` of transformers becomes a frozen `QuantizedLinear` that decodes
    as it is used. Embeddings, norms, layers named in `skip` and weights that two modules share are left.
    Everything is computed before the first layer is swapped: an error leaves the model as it was. Rows of a
    weight, as [out, in], follow each other and are cut into blocks (a block goes on in the next row where the
    row's length is no multiple of `block_size`); the weight of a `Conv1D` is transposed first.

    Args:
        model_or_weight: a model, changed in place, or a tensor of any shape, left alone.
        codebook: levels to use; by default they are solved for `block_size`, `signed` and `criterion`. Pass
            `nf4_codebook()` and its like to compare, or `solve_codebook(data=…)` to fit your own weights.
        block_size: weights that share a constant.
        signed: BOF4-S (a block is divided by its largest weight with its sign) or BOF4 (by its magnitude).
        criterion: what the levels minimise, "mse" or "mae" of the weights.
        opq: weights beyond this quantile of the largest of a normal block are kept in 16 bits; None for none.
        skip: layers to leave: a whole name, the name of a part that holds them, or the last piece of a name.
        scale_dtype: how the constants are stored.

    Returns:
        The module or a `QTensor`, and what it cost.

    Raises:
        NotApplicable: the model has no linear layer to quantise.
        InputError: a weight has non-finite entries, or an option is out of range.

    Source:
        "Improving Block-Wise LLM Quantization by 4-bit Block-Wise Optimal Float (BOF4)", arXiv 2505.06653.

    Example:
        >>> import torch
        >>> from assay.compress import bof4
        >>> w = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        >>> packed, cost = bof4(w, opq=None)
        >>> print(f"{cost.bits_per_weight} bits, relative error {cost.relative_error:.4f}")
        4.25 bits, relative error 0.0073
    """
    if not isinstance(model_or_weight, Tensor | nn.Module):
        raise InputError(f"bof4 was given a {type(model_or_weight).__name__}: pass a tensor or a torch module")
    book = _given(codebook) or solve_codebook(block_size, signed, criterion)
    if isinstance(model_or_weight, Tensor):
        packed = quantize(model_or_weight, book, block_size, opq, scale_dtype=scale_dtype)
        return packed, Bof4Result((_measure("weight", model_or_weight, packed),), {}, book, block_size, opq, 0)
    new, errors, left = _packed_layers(model_or_weight, book, block_size, opq, skip, scale_dtype, measure=True)
    total = sum(p.numel() for p in model_or_weight.parameters())
    result = Bof4Result(tuple(errors), left, book, block_size, opq, total - sum(layer.n_weights for layer in errors))
    return swap(model_or_weight, new), result
