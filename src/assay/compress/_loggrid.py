"""Logarithmic grids with two bases: their levels, the search for the best one of each row, and packed storage.

Source: LogART: Pushing the Limit of Efficient Logarithmic Post-Training Quantization (openreview:V85HbymBLW).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Float, Int8, Int16, Integer, UInt8
from torch import Tensor

from assay.compress._packing import pack, unpack
from assay.core.errors import InputError

Base = Literal["dynamic", "log2", "sqrt2"]

# What stands in for √2 in shift-and-add hardware, by the number of terms.
_ROOT2 = {None: math.sqrt(2), 2: 1 + 1 / 2, 3: 1 + 1 / 2 - 1 / 16, 4: 1 + 1 / 2 - 1 / 16 - 1 / 64}

# Values handled at a time in a search.
_CHUNK = 1 << 22

# A shortlist is made from every fourth scale and what lies around the best of them: the error is smooth in the scale.
_COARSE = 4
_STARTS = 4

# Quarters of an octave: levels stand on even ones, the borders between neighbouring levels on any. The range is that
# of float64.
_LEAST, _MOST = -4400, 4100


@lru_cache(maxsize=8)
def _quarters(dtype: torch.dtype, device: torch.device) -> Tensor:
    """2^(k/4) for k from _LEAST to _MOST; the mantissas repeat exactly from octave to octave."""
    k = torch.arange(_LEAST, _MOST + 1)
    octave = torch.div(k, 4, rounding_mode="floor")
    mantissa = torch.tensor([2 ** (i / 4) for i in range(4)], dtype=torch.float64)[k - 4 * octave]
    # In two halves, because 2^-1100 alone is zero.
    half = torch.div(octave, 2, rounding_mode="floor")
    return (mantissa * torch.exp2(half.double()) * torch.exp2((octave - half).double())).to(device, dtype)


@dataclass(frozen=True, eq=False)
class LogGrid:
    """For every row of a matrix the levels that its weights may take: ± powers of 2 and of √2, and zero.

    A row has L = 2^(bits − 1) magnitudes. From `top` downwards the first L − `base2` go down by half an octave each (base √2),
    the others by a whole one (base 2). All are multiplied by the row's scale, which clips the largest weights where
    it is below 1. Where one sign reaches less far than the other, its unused codes give more low levels to both.

    Attributes:
        bits: of a code, 2 to 6.
        top: twice the exponent of the largest magnitude before scaling, `[rows]`.
        base2: how many of the L magnitudes are powers of 2, `[rows]`.
        skew: d where the positive side reaches further than the negative one by d codes (or as far), ~d = −d − 1
            where the negative side does, `[rows]`.
        percent: the scale in hundredths, 1 to 100, `[rows]`.
        hardware_terms: how many shifted terms stand in for √2: 2 (1.5), 3 (1.4375), 4 (1.421875); None for √2.
        strict: no more than 2^bits codes: the side that reaches less far lacks its smallest level, and its unused
            codes are counted after scaling. Otherwise as in the authors' code: 2^bits + 1 codes and more, the border
            between the two bases is not scaled, and an odd d adds a level too many.

    Example:
        >>> import torch
        >>> from assay.compress import search_log_grid
        >>> grid = search_log_grid(torch.tensor([[1.0, -0.3, 0.1, 0.02]]), bits=3, base="log2", scale_search=False)
        >>> grid.levels
        tensor([[-0.2500, -0.1250,  0.0000,  0.0625,  0.1250,  0.2500,  0.5000,  1.0000]])
    """

    bits: int
    top: Int16[Tensor, " rows"]
    base2: UInt8[Tensor, " rows"]
    skew: Int8[Tensor, " rows"]
    percent: UInt8[Tensor, " rows"]
    hardware_terms: int | None = None
    strict: bool = True

    @property
    def scale(self) -> Float[Tensor, " rows"]:
        """What the levels of each row are multiplied by, in (0, 1]."""
        return self.percent.float() / 100

    @cached_property
    def levels(self) -> Float[Tensor, "rows codes"]:
        """The value of each code, ascending, float32. Without `strict`, codes that a row lacks repeat its ends."""
        return self._tables(torch.float32)[0]

    @property
    def n_codes(self) -> int:
        """How many codes the longest row of levels has."""
        return 2**self.bits if self.strict else 2 * self._half + 1

    @property
    def code_bits(self) -> int:
        """The bits that hold a code: `bits` where the grid is strict."""
        return (self.n_codes - 1).bit_length()

    @cached_property
    def _half(self) -> int:
        """How many levels a sign has at most in a grid that is not strict."""
        n = _per_sign(self.bits, self.base2.long(), self.skew.long())
        return int(n.max()) if n.numel() else 2 ** (self.bits - 1)

    def _tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return _tables(
            self.top.long(),
            self.base2.long(),
            self.skew.long(),
            self.percent.to(dtype) / 100,
            self.bits,
            self.hardware_terms,
            None if self.strict else self._half,
        )

    def quantize(self, w: Float[Tensor, "rows in"]) -> tuple[Float[Tensor, "rows in"], UInt8[Tensor, "rows in"]]:
        """Rounds weights to the nearest level on the logarithmic scale.

        Args:
            w: weights, one row of the grid each.

        Returns:
            The rounded weights, in the type of `w`, and their codes.

        Raises:
            InputError: `w` is not a matrix with as many rows as the grid.
        """
        if w.ndim != 2 or len(w) != len(self.top):
            raise InputError(f"weight has shape {tuple(w.shape)}: this grid takes a matrix of {len(self.top)} rows")
        work = _work(w)
        levels, borders = self._tables(work.dtype)
        index = torch.searchsorted(borders, work.contiguous())
        return levels.gather(1, index).to(w.dtype), index.to(torch.uint8)

    def dequantize(self, codes: Integer[Tensor, "rows in"]) -> Float[Tensor, "rows in"]:
        """What codes stand for, in float32."""
        return self.levels.gather(1, codes.long())

    def to(self, device: torch.device | str) -> LogGrid:
        """The same on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in GRID_FIELDS})

    def __getitem__(self, rows: slice | Integer[Tensor, " some"]) -> LogGrid:
        """The grid of some rows."""
        return replace(self, **{name: getattr(self, name)[rows] for name in GRID_FIELDS})


GRID_FIELDS = ("top", "base2", "skew", "percent")
_ROW_BITS = 16 + 8 + 8 + 8


def _work(w: Tensor) -> Tensor:
    return w.detach().to(torch.float64 if w.dtype == torch.float64 else torch.float32)


def _per_sign(bits: int, base2: Tensor, skew: Tensor) -> Tensor:
    """Levels a sign in a grid that is not strict: an odd skew adds one too many, and base √2 alone none."""
    d = torch.where(skew >= 0, skew, ~skew)
    return 2 ** (bits - 1) + torch.where(base2 > 0, (d + 1) // 2, 0)


def _tables(
    top: Integer[Tensor, "*rows"],
    base2: Integer[Tensor, "*rows"],
    skew: Integer[Tensor, "*rows"],
    scale: Float[Tensor, "*rows"],
    bits: int,
    terms: int | None,
    half: int | None,
) -> tuple[Float[Tensor, "*rows codes"], Float[Tensor, "*rows borders"]]:
    """Levels and the borders between them, ascending; a weight on a border takes the level of smaller magnitude.

    Args:
        top: as in `LogGrid`, like the next three; they broadcast.
        base2: see there.
        skew: see there.
        scale: as a fraction.
        bits: see there.
        terms: see there.
        half: levels a sign in the table of a grid that is not strict; None for a strict grid.
    """
    top, base2, skew, scale = (t[..., None] for t in torch.broadcast_tensors(top, base2, skew, scale))
    n_magnitudes = 2 ** (bits - 1)
    fine = n_magnitudes - base2
    d = torch.where(skew >= 0, skew, ~skew)
    if half is None:
        n_codes = 2 * n_magnitudes
        code = torch.arange(n_codes, device=top.device)
        short = n_magnitudes - 1 - d // 2
        zero = torch.where(skew >= 0, short, n_codes - 1 - short)
        first_negative = torch.where(skew >= 0, d, 0)
        first_positive = d - first_negative
        index = torch.where(code < zero, code + first_negative, n_codes - 1 - code + first_positive)
        missing = None
    else:
        code = torch.arange(2 * half + 1, device=top.device)
        zero = torch.full_like(d, half)
        index = _per_sign(bits, base2, skew) - (code - half).abs()
        missing = index < 0
        index = index.clamp(min=0)
    coarse_top = 2 * torch.div(top - fine, 2, rounding_mode="floor")
    h = torch.where(index < fine, top - index, coarse_top - 2 * (index - fine))

    powers = _quarters(scale.dtype, scale.device)
    sign = (code > zero).to(scale.dtype) - (code < zero).to(scale.dtype)
    magnitude = powers[(2 * h - _LEAST).clamp(0, _MOST - _LEAST)] * scale
    if terms is not None:
        magnitude = torch.where(h % 2 == 1, magnitude * (_ROOT2[terms] / math.sqrt(2)), magnitude)
    levels = sign * magnitude

    below, above = code[:-1], code[1:]
    to_zero = (above == zero) | (below == zero)
    outer = torch.where(below < zero, h[..., :-1], h[..., 1:])
    between = torch.where(to_zero, 2 * outer - 2, h[..., :-1] + h[..., 1:])
    borders = powers[(between - _LEAST).clamp(0, _MOST - _LEAST)] * scale
    outer_index = torch.where(below < zero, index[..., :-1], index[..., 1:])
    if half is not None:
        # As published: which base a weight falls to is told before scaling.
        split = powers[(top - fine + 1 + coarse_top - _LEAST).clamp(0, _MOST - _LEAST)]
        two_bases = (fine > 0) & (base2 > 0)
        inner_index = torch.where(below < zero, index[..., 1:], index[..., :-1])
        crossing = ~to_zero & (outer_index < fine) & (inner_index >= fine)
        moved = torch.where(outer_index < fine, torch.maximum(borders, split), torch.minimum(borders, split))
        borders = torch.where(two_bases, torch.where(crossing, split, moved), borders)
    # Base √2 alone rounds nothing to zero.
    borders = torch.where(to_zero & (base2 == 0) & (outer_index < fine), 0.0, borders)
    lowest = torch.nextafter(-borders, torch.full_like(borders, -math.inf))
    borders = torch.where(below < zero, lowest, borders)
    if missing is not None:
        unused = torch.where(below < zero, missing[..., :-1], missing[..., 1:])
        borders = torch.where(unused, torch.where(below < zero, -math.inf, math.inf), borders)
    return levels, borders


def _rounded_log2(x: Tensor, per_octave: int) -> Tensor:
    """⌊per_octave · log2 x + ½⌋, which moves by exactly `per_octave` when x doubles; x > 0."""
    mantissa, exponent = torch.frexp(x)
    return torch.floor(per_octave * torch.log2(mantissa) + 0.5).long() + per_octave * exponent.long()


def _reach(
    positive: Float[Tensor, " rows"],
    negative: Float[Tensor, " rows"],
    total: Float[Tensor, " rows"],
    base2: Integer[Tensor, " candidates"],
    percent: Integer[Tensor, " candidates"],
    bits: int,
    asymmetric: bool,
    strict: bool,
) -> tuple[Integer[Tensor, "rows candidates"], Integer[Tensor, "rows candidates"]]:
    """`top` and `skew` of every candidate, from the largest weight of each sign (in float64)."""
    n_magnitudes = 2 ** (bits - 1)
    largest, smaller = torch.maximum(positive, negative), torch.minimum(positive, negative)
    largest = torch.where(largest > 0, largest, 1.0)[:, None]
    top = torch.where(base2 == n_magnitudes, 2 * _rounded_log2(largest, 1), _rounded_log2(largest, 2))
    # The sum of a row breaks the tie, so that negated weights have negated levels.
    positive_side = torch.where(positive == negative, total >= 0, positive > negative)[:, None]
    d = torch.zeros_like(top)
    if asymmetric:
        fine = n_magnitudes - base2
        coarse_top = 2 * torch.div(top - fine, 2, rounding_mode="floor")
        least = torch.finfo(torch.float64).tiny
        x = smaller[:, None].clamp(min=least)
        if strict:
            x = x / (percent.double() / 100)
        border = torch.exp2((top - fine + 1 + coarse_top).double() / 4)
        by_fine = top - _rounded_log2(x, 2)
        by_coarse = fine + coarse_top // 2 - _rounded_log2(x, 1)
        d = torch.where((fine > 0) & ((x > border) | (base2 == 0)), by_fine, by_coarse)
        if strict:
            # Base √2 alone goes on downwards by whole octaves.
            d = torch.where((base2 == 0) & (x <= border), by_coarse, d)
        d = d.clamp(0, 2 * n_magnitudes - strict)
    return top, torch.where(positive_side, d, ~d)


def as_groups(gram: Tensor, n_rows: int, n_in: int) -> Float[Tensor, "groups in in"]:
    """A Gram matrix, or one for each group of consecutive rows, checked and scaled to a mean diagonal of 1.

    Raises:
        InputError: its shape does not fit, or it is not finite.
    """
    groups = gram.detach()[None] if gram.ndim == 2 else gram.detach()
    if groups.ndim != 3 or groups.shape[1:] != (n_in, n_in) or n_rows % max(1, len(groups)):
        raise InputError(f"gram has shape {tuple(gram.shape)}: weights of {n_rows} rows need ({n_in}, {n_in})")
    groups = groups.to(torch.promote_types(groups.dtype, torch.float32))
    mean = groups.diagonal(dim1=1, dim2=2).double().mean()
    if not bool(torch.isfinite(groups.sum())):
        raise InputError("gram has entries that are not finite: leave out the inputs that are not")
    if not mean > 0:
        raise InputError("gram has no positive diagonal entry: the layer was never active on these inputs")
    return groups / mean.to(groups.dtype)


def chunks(n_groups: int, n_rows: int, per_row: int) -> Iterator[tuple[slice, slice]]:
    """Groups and rows of each group, few enough at a time."""
    if n_groups == 1:
        step = max(1, _CHUNK // max(1, per_row))
        for first in range(0, n_rows, step):
            yield slice(0, 1), slice(first, first + step)
    else:
        step = max(1, _CHUNK // max(1, per_row * n_rows))
        for first in range(0, n_groups, step):
            yield slice(first, first + step), slice(0, n_rows)


def check_bits(bits: int) -> None:
    """Refuses a number of bits that no grid has."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 2 <= bits <= 6:
        raise InputError(f"bits is {bits!r}: a logarithmic grid takes 2 to 6 (steps of √2 leave no use for more codes)")


def check_weight(w: Tensor) -> None:
    """Refuses weights that cannot be rounded."""
    if not isinstance(w, Tensor):
        raise InputError(f"weight is a {type(w).__name__}: pass a torch tensor")
    if not w.dtype.is_floating_point:
        raise InputError(f"weight is {w.dtype}: pass floating-point weights")
    if w.device.type == "meta":
        raise InputError("weight is on the meta device and has no values: load the weights first")
    if w.ndim < 2 or w.numel() == 0:
        raise InputError(f"weight has shape {tuple(w.shape)}: pass a matrix [out, in] that is not empty")
    bad = w.numel() - int(torch.isfinite(w).sum())
    if bad:
        raise InputError(f"weight has {bad} non-finite entries: repair the checkpoint first")


def search_log_grid(
    weight: Float[Tensor, "out in"],
    gram: Float[Tensor, "*groups in in"] | None = None,
    *,
    x: Float[Tensor, "*n in"] | None = None,
    bits: int = 4,
    base: Base = "dynamic",
    asymmetric: bool = True,
    scale_search: bool = True,
    hardware_terms: int | None = None,
    strict: bool = True,
    shortlist: int | None = 8,
) -> LogGrid:
    """The grid of each row whose rounding costs least: how many of its levels have base 2, and its scale.

    Without `gram` and `x` the cost is the squared error of the weights. Rows are sorted once, and the error of a
    candidate is then a difference of running sums over its cells. With them it is the squared error of the outputs,
    (ŵ − w) H (ŵ − w)ᵀ, which is computed for the candidates of each row that have the least error with the diagonal
    of H alone. Every fourth scale is tried, and then all around the best.

    Args:
        weight: the matrix.
        gram: H = XᵀX of the layer's inputs, of any scale; or one for each group of consecutive rows (grouped
            convolutions), `[groups, in, in]`.
        x: the inputs themselves, instead of `gram`.
        bits: of a code, 2 to 6.
        base: "dynamic" searches the split of every row, "log2" and "sqrt2" have one base alone.
        asymmetric: let the side with smaller weights lend its unused codes.
        scale_search: try scales 1.00, 0.99, …, 0.01; otherwise 1.
        hardware_terms: see `LogGrid`.
        strict: see `LogGrid`.
        shortlist: how many candidates a row are compared by output error; None for all scales and splits, as
            published, which is far slower.

    Returns:
        The grid. A row of zeros has a grid too, and stays zero.

    Raises:
        InputError: weights, inputs or an option are not as described.

    Source:
        LogART (openreview:V85HbymBLW): dynamic bases, scaling against outliers, asymmetry, hyperparameter search.

    Example:
        >>> import torch
        >>> from assay.compress import search_log_grid
        >>> w = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
        >>> grid = search_log_grid(w, bits=3)
        >>> rounded, codes = grid.quantize(w)
        >>> bool((rounded - w).square().sum() < 0.05 * w.square().sum()), int(codes.max())
        (True, 7)
    """
    check_weight(weight)
    if weight.ndim != 2:
        raise InputError(f"weight has shape {tuple(weight.shape)}: pass a matrix [out, in]")
    _check_options(bits, base, hardware_terms, shortlist)
    if x is not None:
        if gram is not None:
            raise InputError("both gram and x were given: give one of them")
        gram = gram_of(x, weight.shape[1])
    w = _work(weight)
    n_rows, n_in = w.shape
    groups = None if gram is None else as_groups(gram.to(w.device), n_rows, n_in).to(w.dtype)
    candidates = _Candidates(bits, base, asymmetric, scale_search, hardware_terms, strict, w.device)
    n_groups = 1 if groups is None else len(groups)
    by_group = w.view(n_groups, -1, n_in)
    per_row = max(n_in, candidates.n * candidates.n_codes // (1 if shortlist is None else _COARSE))
    chosen = torch.empty(4, n_groups, n_rows // n_groups, dtype=torch.int64, device=w.device)
    for g, r in chunks(n_groups, by_group.shape[1], per_row):
        part = by_group[g, r]
        chosen[:, g, r] = candidates.best(part, None if groups is None else groups[g], shortlist)
    top, base2, skew, percent = chosen.view(4, n_rows)
    return LogGrid(
        bits,
        top.to(torch.int16),
        base2.to(torch.uint8),
        skew.to(torch.int8),
        percent.to(torch.uint8),
        hardware_terms,
        strict,
    )


def _check_options(bits: int, base: str, terms: int | None, shortlist: int | None) -> None:
    check_bits(bits)
    if base not in ("dynamic", "log2", "sqrt2"):
        raise InputError(f'base is {base!r}: use "dynamic", "log2" or "sqrt2"')
    if terms not in _ROOT2:
        raise InputError(f"hardware_terms is {terms!r}: √2 has an approximation of 2, 3 or 4 terms, or None for none")
    if shortlist is not None and shortlist < 1:
        raise InputError(f"shortlist is {shortlist!r}: give at least 1, or None for all candidates")


def gram_of(x: Tensor, n_in: int) -> Float[Tensor, "in in"]:
    """XᵀX / n of inputs, accumulated in float32 or better."""
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.shape[-1:] != (n_in,) or not x.numel():
        raise InputError(f"x is {tuple(getattr(x, 'shape', ()))}: pass floating-point inputs [n, {n_in}]")
    rows = x.detach().reshape(-1, n_in)
    total = torch.zeros(n_in, n_in, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for part in rows.split(max(1, _CHUNK // n_in)):
        part = part.to(total.dtype)
        total.addmm_(part.T, part, alpha=1 / len(rows))
    return total


class _RunningSums:
    """Rows sorted once, so that the error of any levels and borders is a difference of sums at the borders."""

    def __init__(self, w: Float[Tensor, "rows in"], importance: Float[Tensor, "rows in"] | None) -> None:
        self.values, order = w.contiguous().sort(1)
        mass = torch.ones_like(self.values) if importance is None else importance.gather(1, order)
        self.mass, self.first = (
            torch.nn.functional.pad(moment.double().cumsum(1), (1, 0)) for moment in (mass, mass * self.values)
        )

    def cost(
        self, levels: Float[Tensor, "rows k codes"], borders: Float[Tensor, "rows k borders"]
    ) -> Float[Tensor, "rows k"]:
        """Σ mass·(v² − 2 v w) over the cells."""
        cut = torch.searchsorted(self.values, borders.flatten(1).contiguous(), right=True)
        v = levels.double()
        cost = torch.zeros(v.shape[:2], dtype=torch.float64, device=v.device)
        for running, factor in ((self.mass, v.square()), (self.first, -2 * v)):
            at = running.gather(1, cut).view(borders.shape)
            # Σ f_c (S_c − S_{c−1}), summed by parts.
            cost += ((factor[..., :-1] - factor[..., 1:]) * at).sum(-1) + factor[..., -1] * running[:, -1:]
        return cost


class _Candidates:
    """All grids that a row may take, and the choice among them."""

    def __init__(
        self,
        bits: int,
        base: Base,
        asymmetric: bool,
        scale_search: bool,
        terms: int | None,
        strict: bool,
        device: torch.device,
    ) -> None:
        n_magnitudes = 2 ** (bits - 1)
        splits = {"dynamic": list(range(n_magnitudes, -1, -2)), "log2": [n_magnitudes], "sqrt2": [0]}[base]
        percents = torch.arange(100, 0, -1) if scale_search else torch.tensor([100])
        self.base2 = torch.tensor(splits).repeat_interleave(len(percents)).to(device)
        self.percent = percents.repeat(len(splits)).to(device)
        self.n, self.n_scales = len(self.base2), len(percents)
        self.bits, self.terms, self.asymmetric, self.strict = bits, terms, asymmetric, strict
        self.half = None if strict else 2 * n_magnitudes
        self.n_codes = 2**bits if strict else 2 * 2 * n_magnitudes + 1

    def best(
        self, w: Float[Tensor, "groups rows in"], gram: Float[Tensor, "groups in in"] | None, shortlist: int | None
    ) -> Integer[Tensor, "4 groups rows"]:
        """The fields of the best grid of each row."""
        rows = w.reshape(-1, w.shape[-1])
        ends = rows.double()
        positive, negative = ends.amax(1).clamp(min=0), (-ends.amin(1)).clamp(min=0)
        top, skew = _reach(
            positive, negative, ends.sum(1), self.base2, self.percent, self.bits, self.asymmetric, self.strict
        )
        importance = None
        if gram is not None:
            importance = gram.diagonal(dim1=1, dim2=2)[:, None].expand_as(w).reshape(rows.shape)
        everything = torch.arange(self.n, device=w.device).expand(len(rows), -1)
        if self.n == 1 or (gram is not None and shortlist is None):
            order = everything
        else:
            sums = _RunningSums(rows, importance)
            if shortlist is None:
                order, cost = everything, self._separable_cost(sums, top, skew, everything)
            else:
                coarse = everything[:, ::_COARSE] if self.n_scales > 1 else everything
                cost = self._separable_cost(sums, top, skew, coarse)
                if self.n_scales > 1 and gram is None:
                    start = coarse.gather(1, cost.topk(_STARTS, 1, largest=False).indices)
                    order = self._neighbours(start)
                    cost = self._separable_cost(sums, top, skew, order)
                else:
                    order = coarse
            kept = min(shortlist or 1, order.shape[1]) if gram is not None else 1
            order = order.gather(1, cost.topk(kept, 1, largest=False).indices)
        if gram is not None and order.shape[1] > 1:
            order = order.gather(1, self._output_cost(w, gram, top, skew, order).argmin(1, keepdim=True))
        pick = order[:, 0]
        at = pick[:, None]
        fields = [top.gather(1, at)[:, 0], self.base2[pick], skew.gather(1, at)[:, 0], self.percent[pick]]
        return torch.stack(fields).view(4, *w.shape[:2])

    def _neighbours(self, start: Integer[Tensor, "rows starts"]) -> Integer[Tensor, "rows near"]:
        """The candidates of the same split whose scales lie around, each once where they do not overlap."""
        reach = torch.arange(1 - _COARSE, _COARSE, device=start.device)
        split, scale = start // self.n_scales, start % self.n_scales
        near = (scale[..., None] + reach).clamp(0, self.n_scales - 1)
        return (split[..., None] * self.n_scales + near).flatten(1)

    def _separable_cost(
        self, sums: _RunningSums, top: Tensor, skew: Tensor, order: Integer[Tensor, "rows k"]
    ) -> Float[Tensor, "rows k"]:
        """Σ importance·(ŵ − w)², less what all candidates have in common, of the candidates named by `order`."""
        return sums.cost(*self._tables(top, skew, order, sums.values.dtype))

    def _tables(self, top: Tensor, skew: Tensor, order: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return _tables(
            top.gather(1, order),
            self.base2[order],
            skew.gather(1, order),
            self.percent[order].to(dtype) / 100,
            self.bits,
            self.terms,
            self.half,
        )

    def _output_cost(
        self,
        w: Float[Tensor, "groups rows in"],
        gram: Float[Tensor, "groups in in"],
        top: Tensor,
        skew: Tensor,
        order: Integer[Tensor, "rows k"],
    ) -> Float[Tensor, "rows k"]:
        """(ŵ − w) H (ŵ − w)ᵀ of the candidates named by `order`."""
        rows = w.reshape(-1, w.shape[-1])
        cost = torch.empty(order.shape, dtype=w.dtype, device=w.device)
        step = max(1, _CHUNK // rows.numel())
        for first in range(0, order.shape[1], step):
            at = order[:, first : first + step]
            levels, borders = self._tables(top, skew, at, w.dtype)
            spread = rows[:, None].expand(-1, at.shape[1], -1).contiguous()
            error = levels.gather(2, torch.searchsorted(borders, spread)).sub_(spread)
            grouped = error.view(len(gram), -1, rows.shape[1])
            cost[:, first : first + step] = (grouped @ gram).mul_(grouped).sum(-1).view(at.shape)
        return cost


@dataclass(frozen=True, eq=False)
class LogTensor:
    """Weights in packed codes of a logarithmic grid.

    Attributes:
        codes: `code_bits` a weight without gaps; every row begins a new byte, `[rows, bytes]`.
        grid: the grid of every row; a row is what the first dimension of `shape` counts.
        shape: the shape of the decoded tensor.
        dtype: the type that it was made from, the default of `dequantize`.

    Example:
        >>> import torch
        >>> from assay.compress import logart_weight
        >>> packed = logart_weight(torch.randn(16, 512, generator=torch.Generator().manual_seed(0)), bits=4)
        >>> round(packed.bits_per_weight, 3), packed.dequantize().shape
        (4.078, torch.Size([16, 512]))
    """

    codes: UInt8[Tensor, "rows bytes"]
    grid: LogGrid
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, codes: Integer[Tensor, "rows in"], grid: LogGrid, shape: torch.Size, dtype: torch.dtype) -> LogTensor:
        """Packs codes.

        Raises:
            InputError: a code is beyond the grid.
        """
        return cls(pack(codes, grid.code_bits), grid, shape, dtype)

    @property
    def n_weights(self) -> int:
        """How many values it holds."""
        return self.shape.numel()

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over values: the codes, and 40 bits a row for its grid."""
        return (8 * self.codes.numel() + _ROW_BITS * self.shape[0]) / self.n_weights

    def integer_codes(self) -> UInt8[Tensor, "rows in"]:
        """The codes, one a byte."""
        return unpack(self.codes, self.grid.code_bits, self.n_weights // self.shape[0])

    def decode(self, start: int, stop: int) -> Float[Tensor, " n"]:
        """The values `start:stop` of the flattened tensor, in float32."""
        n_in = self.n_weights // self.shape[0]
        first, last = start // n_in, -(-stop // n_in)
        codes = unpack(self.codes[first:last], self.grid.code_bits, n_in)
        table = self.grid.levels[first:last]
        offset = torch.arange(last - first, dtype=torch.int32, device=codes.device) * table.shape[1]
        values = table.reshape(-1).index_select(0, (codes.int() + offset[:, None]).view(-1))
        return values[start - first * n_in : stop - first * n_in]

    def dequantize(self, dtype: torch.dtype | None = None) -> Float[Tensor, "..."]:
        """The decoded tensor; values are computed in float32 and rounded once.

        Args:
            dtype: the type wanted; by default that of the tensor that was quantised.
        """
        n_in = self.n_weights // self.shape[0]
        out = torch.empty(self.n_weights, dtype=dtype or self.dtype, device=self.codes.device)
        for _, rows in chunks(1, self.shape[0], n_in):
            start, stop = rows.start * n_in, min(rows.stop, self.shape[0]) * n_in
            out[start:stop] = self.decode(start, stop)
        return out.view(self.shape)

    def rows(self, first: int, last: int) -> Float[Tensor, "rows in"]:
        """Some rows of a matrix, decoded, in float32."""
        n = self.shape[-1]
        return self.decode(first * n, last * n).view(-1, n)

    def tensors(self) -> dict[str, Tensor]:
        """What has to be stored."""
        return {"codes": self.codes} | {name: getattr(self.grid, name) for name in GRID_FIELDS}

    def settings(self) -> dict[str, Any]:
        """What else has to be known; 0 for √2 itself."""
        return {"bits": self.grid.bits, "terms": self.grid.hardware_terms or 0, "strict": int(self.grid.strict)}

    @classmethod
    def from_stored(cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], shape: torch.Size) -> LogTensor:
        """The inverse of `tensors` and `settings`, with float32 as the type that it decodes to."""
        grid = LogGrid(
            settings["bits"],
            **{name: tensors[name] for name in GRID_FIELDS},
            hardware_terms=settings["terms"] or None,
            strict=bool(settings["strict"]),
        )
        return cls(tensors["codes"], grid, shape, torch.float32)

    def to(self, device: torch.device | str) -> LogTensor:
        """The same on another device."""
        return replace(self, codes=self.codes.to(device), grid=self.grid.to(device))
