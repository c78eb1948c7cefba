"""Block-wise 4-bit storage: a codebook, a packed tensor that decodes on the fly, and a linear layer over it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, UInt8
from scipy.special import ndtri
from torch import Tensor, nn

from assay.core.errors import InputError, NotApplicable

Scaling = Literal["absmax", "signed", "minmax"]

# Weights handled at a time. On a CPU the temporaries of one chunk then stay in the second-level cache, which is
# what makes decoding cheaper than reading 16-bit weights from memory would suggest; a GPU wants large launches.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 25

# An outlier is a bfloat16 value and a 64-bit position.
_OUTLIER_BITS = 80

# Up to this many rows a product is bound by decoding, not by arithmetic, and casting the decoded weights down to
# the activations' type costs more than multiplying in float32.
_FEW_ROWS = 8


@dataclass(frozen=True)
class Codebook:
    """Sixteen levels, and how a block of weights is brought to their range.

    Args:
        levels: the reconstruction levels of a normalised weight, ascending, at most 16.
        scaling: "absmax" divides a block by its largest magnitude; "signed" divides it by the weight of largest
            magnitude, sign included, so that this weight always becomes +1; "minmax" maps the block's range to
            [0, 1] and stores a second constant per block.
        name: what tables call it.

    Raises:
        InputError: there are more than 16 levels or fewer than 2, they do not ascend, or one is not finite.

    Example:
        >>> from assay.compress import nf4_codebook
        >>> nf4_codebook().levels[7], nf4_codebook().scaling
        (0.0, 'absmax')
    """

    levels: tuple[float, ...]
    scaling: Scaling
    name: str = "codebook"

    def __post_init__(self) -> None:
        if not 2 <= len(self.levels) <= 16:
            raise InputError(f"codebook has {len(self.levels)} levels: 4 bits hold 2 to 16")
        if not all(map(math.isfinite, self.levels)):
            raise InputError("codebook has a level that is not finite: every level must be a number")
        if any(b <= a for a, b in zip(self.levels, self.levels[1:])):
            raise InputError("codebook levels do not ascend: sort them and drop duplicates")
        if self.scaling not in ("absmax", "signed", "minmax"):
            raise InputError(f'codebook scaling is {self.scaling!r}: use "absmax", "signed" or "minmax"')

    @property
    def boundaries(self) -> tuple[float, ...]:
        """The midpoints between levels; a value on one takes the lower level."""
        return tuple((a + b) / 2 for a, b in zip(self.levels, self.levels[1:]))


def _encoder(codebook: Codebook, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The function from normalised values to the indices (uint8) of their nearest levels.

    A uniform grid with at most one boundary a cell lets two look-ups replace a binary search, which is ten times
    slower on a CPU; where two boundaries are too close for a small grid the search is used.
    """
    bounds = torch.tensor(codebook.boundaries, dtype=dtype, device=device)
    for n_cells in (64, 256, 1024, 4096):
        at = _cell(bounds, n_cells)
        if at.unique().numel() == at.numel():
            below = (at[None] < torch.arange(n_cells, device=device)[:, None]).sum(1).to(torch.uint8)
            bound = torch.full((n_cells,), math.inf, dtype=dtype, device=device)
            bound[at.long()] = bounds
            return partial(_encode_by_cell, below=below, bound=bound)
    return lambda x: torch.bucketize(x, bounds, out_int32=True).to(torch.uint8)


def _encode_by_cell(x: Tensor, below: Tensor, bound: Tensor) -> Tensor:
    cell = _cell(x, bound.numel())
    return below.index_select(0, cell).add_(x > bound.index_select(0, cell))


def _cell(x: Tensor, n_cells: int) -> Tensor:
    # Monotone in x also in floating point, so comparing cells agrees with comparing values.
    half = n_cells // 2
    return (x * half).add_(half).clamp_(0, n_cells - 1).to(torch.int32)


def outlier_threshold(block_size: int, q: float) -> float:
    """The quantile `q` of the largest magnitude among `block_size` standard normal values.

    F_M(m) = (2Φ(m) − 1)^I, hence τ = Φ⁻¹((1 + q^(1/I)) / 2).
    """
    # The upper tail, 1 − q^(1/I), without the cancellation.
    tail = -math.expm1(math.log(q) / block_size)
    return -float(ndtri(tail / 2)) if tail > 0 else math.inf


@dataclass(frozen=True, eq=False)
class QTensor:
    """A tensor in 4-bit blocks.

    The tensor is read in its own (row-major) order; `block_size` consecutive values share a scale, across the end
    of a row where the row's length is no multiple of it.

    Args:
        codes: two codes a byte, the earlier one in the low half, [ceil(n / 2)].
        scales: one constant per block, [ceil(n / block_size)].
        levels: the codebook's levels, float32, [16].
        block_size: values per block.
        shape: the shape of the decoded tensor.
        dtype: the type it was made from, the default of `dequantize`.
        offsets: the smallest value of each block ("minmax" codebooks), else None.
        outlier_index: positions in the flattened tensor kept in 16 bits, ascending, [k].
        outlier_value: their values, bfloat16, [k].

    Example:
        >>> import torch
        >>> from assay.compress import quantize, solve_codebook
        >>> w = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
        >>> q = quantize(w, solve_codebook(64), opq=None)
        >>> q.bits_per_weight, q.dequantize().shape
        (4.25, torch.Size([128, 256]))
    """

    codes: UInt8[Tensor, " bytes"]
    scales: Float[Tensor, " blocks"]
    levels: Float[Tensor, " levels"]
    block_size: int
    shape: torch.Size
    dtype: torch.dtype
    offsets: Float[Tensor, " blocks"] | None
    outlier_index: Int[Tensor, " k"]
    outlier_value: Float[Tensor, " k"]

    @property
    def n_weights(self) -> int:
        """How many values it holds."""
        return self.shape.numel()

    @property
    def n_outliers(self) -> int:
        """How many of them are kept in 16 bits."""
        return self.outlier_index.numel()

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over values: 4 + 16 / block_size with bfloat16 scales, and 80 for each outlier."""
        constants = 1 if self.offsets is None else 2
        bits = 8 * (self.codes.numel() + constants * self.scales.numel() * self.scales.element_size())
        return (bits + _OUTLIER_BITS * self.n_outliers) / self.n_weights

    @cached_property
    def _pairs(self) -> Tensor:
        """The two float32 values of each byte as one 64-bit word, [256]: one look-up decodes two codes."""
        table = torch.zeros(16, dtype=torch.float32, device=self.levels.device)
        table[: self.levels.numel()] = self.levels
        return torch.stack([table.repeat(16), table.repeat_interleave(16)], -1).view(torch.int64).squeeze(-1)

    def decode(self, start: int, stop: int) -> Float[Tensor, " n"]:
        """The values `start:stop` of the flattened tensor, in float32."""
        unit = math.lcm(self.block_size, 2)
        lo = start // unit * unit
        hi = min(-(-stop // unit) * unit, self.n_weights)
        words = self._pairs.index_select(0, self.codes[lo // 2 : -(-hi // 2)].int())
        values = words.view(torch.float32)[: hi - lo]
        self._rescale(values, lo // self.block_size)
        if self.n_outliers:
            first, last = 0, self.n_outliers
            if hi - lo < self.n_weights:
                ends = torch.tensor([lo, hi], device=self.outlier_index.device)
                first, last = torch.searchsorted(self.outlier_index, ends).tolist()
            values[self.outlier_index[first:last] - lo] = self.outlier_value[first:last].float()
        return values[start - lo : stop - lo]

    def rows(self, first: int, last: int) -> Float[Tensor, "rows in"]:
        """Some rows of a matrix, decoded, in float32."""
        n = self.shape[-1]
        return self.decode(first * n, last * n).view(-1, n)

    def tensors(self) -> dict[str, Tensor]:
        """What has to be stored."""
        return {name: t for name in _BUFFERS if (t := getattr(self, name)) is not None}

    def settings(self) -> dict[str, Any]:
        """What else has to be known."""
        return {"block_size": self.block_size}

    @classmethod
    def from_stored(cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], shape: torch.Size) -> QTensor:
        """The inverse of `tensors` and `settings`, with float32 as the type that it decodes to."""
        stored = {name: tensors.get(name) for name in _BUFFERS}
        return cls(**stored, **settings, shape=shape, dtype=torch.float32)  # type: ignore[arg-type]

    def _rescale(self, values: Tensor, block: int) -> None:
        whole = values.numel() // self.block_size
        parts = [(values[: whole * self.block_size].view(-1, self.block_size), slice(block, block + whole))]
        if values.numel() % self.block_size:
            tail = values[whole * self.block_size :][None]
            parts.append((tail, slice(block + whole, block + whole + 1)))
        for part, at in parts:
            part.mul_(self.scales[at, None].float())
            if self.offsets is not None:
                part.add_(self.offsets[at, None].float())

    def dequantize(self, dtype: torch.dtype | None = None) -> Float[Tensor, "..."]:
        """The decoded tensor; values are computed in float32 and rounded once.

        Args:
            dtype: the type wanted; by default that of the tensor that was quantised.
        """
        out = torch.empty(self.n_weights, dtype=dtype or self.dtype, device=self.codes.device)
        for start, stop in _spans(self.n_weights, self.block_size, out.device):
            out[start:stop] = self.decode(start, stop)
        return out.view(self.shape)

    def to(self, device: torch.device | str) -> QTensor:
        """The same on another device."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            levels=self.levels.to(device),
            offsets=None if self.offsets is None else self.offsets.to(device),
            outlier_index=self.outlier_index.to(device),
            outlier_value=self.outlier_value.to(device),
        )


def _spans(n: int, block_size: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Cuts 0:n into chunks of whole pairs of blocks, so that every chunk begins on a byte."""
    unit = math.lcm(block_size, 2)
    chunk = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    step = max(unit, chunk // unit * unit)
    for start in range(0, n, step):
        yield start, min(start + step, n)


def check_block_size(block_size: int) -> None:
    """Refuses a block size that no method here takes."""
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 2:
        raise InputError(f"block_size is {block_size!r}: use a whole number of at least 2, such as 64")


def quantize(
    w: Float[Tensor, "..."],
    codebook: Codebook,
    block_size: int = 64,
    opq: float | None = 0.95,
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> QTensor:
    """Stores a tensor in 4-bit blocks, optionally with its outliers apart in 16 bits.

    Weights are normalised by the scale as it is stored, so the nearest level is nearest after decoding too. A
    bfloat16 scale adds about 0.02 % to the squared error of Gaussian weights in float32, and nothing where the
    weights are bfloat16 themselves; with `scale_dtype=torch.float32` the largest weight of every block is kept
    exactly (outliers apart) and error figures are those of unrounded constants.

    Outlier-preserving quantisation sets aside every weight beyond τ sample standard deviations of its block, τ
    being the quantile `opq` of the largest of `block_size` normal magnitudes, and quantises the rest of the block
    without it. By Chebyshev's inequality at most block_size / τ² weights can lie that far from the block's mean: a
    block with more than that is not centred at zero, the rule does not fit it, and it keeps all its weights.

    Args:
        w: weights of any shape and floating type; read in row-major order.
        codebook: the levels and how blocks are normalised.
        block_size: consecutive weights that share a scale.
        opq: the quantile beyond which a weight is an outlier, in (0, 1]; None or 1 keeps none apart.
        scale_dtype: how the constants are stored: torch.bfloat16, torch.float16, torch.float32.

    Returns:
        The packed tensor, on the device of `w`.

    Raises:
        InputError: `w` is empty, not floating, has no data or non-finite entries, an option is out of range, or a
            block's scale does not fit `scale_dtype`.

    Source:
        "Improving Block-Wise LLM Quantization by 4-bit Block-Wise Optimal Float (BOF4)", arXiv 2505.06653.

    Example:
        >>> import torch
        >>> from assay.compress import nf4_codebook, quantize
        >>> w = torch.tensor([0.0, 0.5, -2.0, 1.0])
        >>> quantize(w, nf4_codebook(), block_size=4, opq=None).dequantize()
        tensor([ 0.0000,  0.4922, -2.0000,  0.8814])
    """
    check_block_size(block_size)
    _check_weight(w)
    if opq is not None and not 0 < opq <= 1:
        raise InputError(f"opq is {opq!r}: use a quantile in (0, 1], or None to keep no outliers apart")
    if scale_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InputError(f"scale_dtype is {scale_dtype}: use torch.bfloat16, torch.float16 or torch.float32")
    flat = w.detach().reshape(-1)
    n = flat.numel()
    work_dtype = torch.float64 if w.dtype == torch.float64 else torch.float32
    threshold = None if opq is None or opq == 1 else outlier_threshold(block_size, opq)
    encode = _encoder(codebook, work_dtype, w.device)
    codes = torch.empty(-(-n // 2), dtype=torch.uint8, device=w.device)
    n_blocks = -(-n // block_size)
    scales = torch.empty(n_blocks, dtype=scale_dtype, device=w.device)
    offsets = torch.empty_like(scales) if codebook.scaling == "minmax" else None
    found: list[tuple[Tensor, Tensor]] = []
    for start, stop in _spans(n, block_size, w.device):
        blocks = _blocks(flat[start:stop].to(work_dtype), block_size)
        if threshold is not None:
            at = _outliers(blocks, stop - start, threshold)
            if at.numel():
                found.append((at + start, blocks.view(-1)[at].to(torch.bfloat16)))
                blocks = blocks.view(-1).index_fill(0, at, 0).view_as(blocks)
        scale, offset = _constants(blocks, codebook.scaling, scale_dtype)
        span = slice(start // block_size, start // block_size + blocks.shape[0])
        scales[span] = scale
        if offsets is not None:
            offsets[span] = offset
            blocks = blocks - offset[:, None].to(work_dtype)
        divisor = scale.to(work_dtype)
        x = blocks / torch.where(divisor == 0, 1, divisor)[:, None]
        code = encode(x.view(-1))[: stop - start]
        if code.numel() % 2:
            code = torch.cat([code, code.new_zeros(1)])
        codes[start // 2 : -(-stop // 2)] = code[0::2] | (code[1::2] << 4)
    return QTensor(
        codes=codes,
        scales=scales,
        levels=torch.tensor(codebook.levels, dtype=torch.float32, device=w.device),
        block_size=block_size,
        shape=w.shape,
        dtype=w.dtype,
        offsets=offsets,
        outlier_index=torch.cat([i for i, _ in found]) if found else codes.new_zeros(0, dtype=torch.int64),
        outlier_value=torch.cat([v for _, v in found]) if found else scales.new_zeros(0, dtype=torch.bfloat16),
    )


def _check_weight(w: Tensor) -> None:
    if not isinstance(w, Tensor):
        raise InputError(f"weight is a {type(w).__name__}: pass a torch tensor")
    if not w.dtype.is_floating_point:
        raise InputError(f"weight tensor is {w.dtype}: pass floating-point weights")
    if w.device.type == "meta":
        raise InputError("weight tensor is on the meta device and has no values: load the weights first")
    if w.numel() == 0:
        raise InputError(f"weight tensor of shape {tuple(w.shape)} is empty: there is nothing to quantise")
    # A sum is forty times faster than a mask, and finite only if every entry is.
    if not torch.isfinite(w.sum(dtype=torch.promote_types(w.dtype, torch.float32))):
        bad = w.numel() - int(torch.isfinite(w).sum())
        if bad:
            raise InputError(f"weight tensor has {bad} non-finite entries: repair the checkpoint first")


def _blocks(flat: Tensor, block_size: int) -> Tensor:
    """[blocks, block_size], the last block padded with zeros."""
    pad = -flat.numel() % block_size
    return (nn.functional.pad(flat, (0, pad)) if pad else flat).view(-1, block_size)


def _outliers(blocks: Tensor, n: int, threshold: float) -> Tensor:
    """Positions, in the flattened blocks, beyond `threshold` sample deviations; the padding after `n` is no sample."""
    block_size = blocks.shape[1]
    centred = blocks - blocks.mean(1, keepdim=True)
    std = (centred.square().sum(1, keepdim=True) / (block_size - 1)).sqrt()
    most = torch.full((blocks.shape[0],), block_size / threshold**2, device=blocks.device)
    rest = n % block_size
    if rest:
        # A single value has no sample deviation; NaN compares false, so it is no outlier.
        std[-1] = blocks[-1, :rest].std() if rest > 1 else math.nan
        most[-1] = rest / threshold**2
    at = (blocks.abs() > std * threshold).view(-1).nonzero().squeeze(1)
    block = at // block_size
    per_block = torch.bincount(block, minlength=blocks.shape[0])
    return at[(per_block <= most)[block]]


def _constants(blocks: Tensor, scaling: Scaling, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scale and the offset of each block, rounded to how they are stored."""
    low, high = blocks.amin(1), blocks.amax(1)
    offset = low.to(dtype)
    if scaling == "minmax":
        scale = high - offset.to(high.dtype)
    elif scaling == "absmax":
        scale = torch.maximum(high, -low)
    else:
        scale = torch.where(high > -low, high, low)
        tied = (high == -low).nonzero().squeeze(1)
        if tied.numel():
            # The first of the largest wins, so that negating the weights negates the scale.
            rows = blocks[tied]
            scale[tied] = rows.gather(1, rows.abs().argmax(1, keepdim=True)).squeeze(1)
    stored = scale.to(dtype)
    lost = ~torch.isfinite(stored) | ((stored == 0) & (scale != 0))
    if scaling == "minmax":
        lost |= ~torch.isfinite(offset)
    if lost.any():
        worst = scale[lost][0].item()
        raise InputError(f"scale exceeds dtype range: {worst:.3g} in {dtype}: use scale_dtype=torch.float32")
    return stored, offset


@dataclass(frozen=True)
class Distance:
    """Sums over the weights of a tensor against its packed form.

    Args:
        squared: Σ (ŵ − w)².
        absolute: Σ |ŵ − w|.
        energy: Σ w².
    """

    squared: float
    absolute: float
    energy: float


def distance(w: Float[Tensor, "..."], q: QTensor) -> Distance:
    """How far `q` decodes from `w`, accumulated in float64."""
    flat = w.detach().reshape(-1)
    sums = torch.zeros(3, dtype=torch.float64, device=w.device)
    for start, stop in _spans(flat.numel(), q.block_size, w.device):
        exact = flat[start:stop].double()
        gap = q.decode(start, stop).double() - exact
        sums += torch.stack([gap.square().sum(), gap.abs().sum(), exact.square().sum()])
    return Distance(*sums.tolist())


class _DecodedWeight(Tensor):
    """A decoded copy of packed weights: reads like any tensor, refuses to be assigned through `.data`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise NotApplicable(
            "the weight of a 4-bit layer is decoded on reading and cannot be assigned: merge adapters into the "
            "original checkpoint and quantise the merged one"
        )


class Product(torch.autograd.Function):
    """x Wᵀ that keeps the packed weights, not the decoded ones, for the backward pass."""

    @staticmethod
    def forward(x: Tensor, weight: Any) -> Tensor:
        few = x.shape[0] <= _FEW_ROWS
        dtype = torch.promote_types(x.dtype, torch.float32) if few else x.dtype
        cast = x.to(dtype)
        parts = [cast @ rows.to(dtype).T for _, rows in row_chunks(weight)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
        ctx.weight = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total_dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(grad.shape[0], ctx.weight.shape[1], dtype=total_dtype)
        for span, rows in row_chunks(ctx.weight):
            total += grad[:, span] @ rows.to(grad.dtype)
        return total.to(grad.dtype), None


def row_chunks(weight: Any) -> Iterator[tuple[slice, Tensor]]:
    """A packed matrix decoded a few rows at a time: which rows, and their values in float32."""
    n_rows, n_columns = weight.shape
    chunk = _CPU_CHUNK if weight.codes.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // n_columns)
    for first in range(0, n_rows, step):
        last = min(first + step, n_rows)
        yield slice(first, last), weight.rows(first, last)


class DecodingLinear(nn.Linear):
    """What linear layers share whose weight stays packed: it is decoded as it is used, some rows at a time.

    A subclass gives `packed` and sets `in_features`, `out_features` and `bias`.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]

    @property
    def packed(self) -> Any:
        """The weight in its packed form; shares the layer's memory."""
        raise NotImplementedError

    @property
    def weight(self) -> Float[Tensor, "out in"]:  # type: ignore[override]
        """The weight, decoded afresh at each reading; assigning to its `data` is refused."""
        return self.packed.dequantize().as_subclass(_DecodedWeight)

    def forward(self, input: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """The layer's output, in the type of `input` (under autocast, in autocast's type)."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        rows: Tensor = Product.apply(input.reshape(-1, self.in_features), self.packed)
        out = rows.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class QuantizedLinear(DecodingLinear):
    """A frozen linear layer whose weight stays in 4-bit blocks and is decoded as it is used.

    It counts as an `nn.Linear`, so adapters attach to it as to one; only the bias is a parameter (frozen). Reading
    `weight` decodes a copy; assigning to it is refused. Gradients flow to the input. It computes in the type of
    its input (float32 where there are few rows), and `.to(dtype)` leaves the packed buffers as they are. Its
    `state_dict` holds the packed form, and loads into a layer of the same shape and block size.

    Args:
        weight: the packed weight, [out_features, in_features].
        bias: the bias, [out_features], or None.

    Raises:
        InputError: the weight is not a matrix, or the bias does not fit it.

    Example:
        >>> import torch
        >>> from assay.compress import QuantizedLinear, quantize, solve_codebook
        >>> weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        >>> layer = QuantizedLinear(quantize(weight, solve_codebook(64)))
        >>> layer(torch.ones(2, 64)).shape, len(list(layer.parameters()))
        (torch.Size([2, 8]), 0)
    """

    def __init__(self, weight: QTensor, bias: Float[Tensor, " out"] | None = None) -> None:
        nn.Module.__init__(self)
        if len(weight.shape) != 2:
            raise InputError(f"packed weight has shape {tuple(weight.shape)}: a linear layer takes a matrix")
        self.out_features, self.in_features = weight.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise InputError(f"bias has shape {tuple(bias.shape)}: the weight needs ({self.out_features},)")
        self.block_size = weight.block_size
        self.compute_dtype = weight.dtype
        for name in _BUFFERS:
            self.register_buffer(name, getattr(weight, name))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def packed(self) -> QTensor:
        """The weight in its packed form; shares the layer's memory."""
        return QTensor(
            **{name: getattr(self, name) for name in _BUFFERS},
            block_size=self.block_size,
            shape=torch.Size((self.out_features, self.in_features)),
            dtype=self.compute_dtype,
        )

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{super().extra_repr()}, bits_per_weight={self.packed.bits_per_weight:.3f}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        # `.to(dtype)` and `.half()` must not round scales and levels; they only say what to decode to.
        before = dict(self._buffers)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.packed.codes.device)).dtype
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The number of outliers and the type of the scales are the file's to say.
        for name in _BUFFERS:
            own, new = self._buffers[name], state_dict.get(prefix + name)
            if own is not None and new is not None:
                shape = new.shape if name.startswith("outlier") else own.shape
                if shape != own.shape or new.dtype != own.dtype:
                    self._buffers[name] = torch.empty(shape, dtype=new.dtype, device=own.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


_BUFFERS = ("codes", "scales", "levels", "offsets", "outlier_index", "outlier_value")


def linear_layers(model: nn.Module, skip: Iterable[str]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The layers of a model that can be packed, and the linear ones that are left, with the reason.

    Exactly `nn.Linear` and the `Conv1D` of transformers are taken: a subclass may use its weight in another way.

    Args:
        model: the model.
        skip: names to leave: the whole name of a layer or of a part that holds it, or the last piece of one.
    """
    skip = tuple(skip)
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    taken: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear and not is_conv1d(module):
            continue
        if any(_names(name, s) for s in skip):
            left[name] = "skipped by name"
        elif owners[id(module.weight)] > 1:
            left[name] = "weight shared with another module"
        else:
            taken[name] = module
    return taken, left


def _names(name: str, pattern: str) -> bool:
    return f".{name}.".endswith(f".{pattern}.") or name.startswith(f"{pattern}.")


def is_conv1d(module: nn.Module) -> bool:
    # Nothing can be an instance of it where transformers was never imported.
    home = sys.modules.get("transformers.pytorch_utils")
    return home is not None and type(module) is home.Conv1D


def matrix(layer: nn.Module) -> Float[Tensor, "out in"]:
    """The weight of a layer from `linear_layers` as [out, in]; that of `Conv1D` is stored transposed."""
    weight = layer.get_parameter("weight").detach()
    return weight.T if is_conv1d(layer) else weight


def swap(model: nn.Module, new: dict[str, nn.Module]) -> nn.Module:
    """Puts new layers in the places of old ones, wherever the old ones are used; returns the model."""
    if "" in new:
        return new[""]
    by_old = {id(model.get_submodule(name)): layer for name, layer in new.items()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in by_old:
                parent._modules[name] = by_old[id(child)]
    return model
