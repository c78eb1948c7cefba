"""DDT: training with weights and activations of any precision and sparsity, by denoising what was quantised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int16, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from assay.compress._blockwise import is_conv1d, linear_layers, matrix, swap
from assay.compress._packing import pack, packed_width, unpack
from assay.core.errors import InputError, NotApplicable
from assay.core.results import Column, Result, Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "DDTCodes",
    "DDTLayer",
    "DDTLinear",
    "DDTPackedLinear",
    "DDTResult",
    "DDTWeight",
    "ddt",
    "ddt_codes",
    "ddt_convert",
    "ddt_denoise",
    "ddt_export",
    "ddt_matmul",
]

Scheme = Literal["affine", "linear"]
Estimator = Literal["ddt", "ste"]
Keep = tuple[int, int] | float | None

_TERNARY = 1.5
# Patterns of a group are stored by number where a number of at most 8 bits says which one it is.
_MOST_PATTERNS = 256


# ---- the transform -----------------------------------------------------------------------------------------------


def ddt_denoise(
    x: Float[Tensor, "*rows n"], q: Float[Tensor, "*rows n"], *, scheme: Scheme = "affine", lam: float = 0.01
) -> Float[Tensor, "*rows n"]:
    """The values nearest to `x` that are a ridge regression on the codes `q`, row by row.

    Affine: Cov(x, q) / (Var(q) + λ) · (q − q̄) + x̄. Linear: s q with s = mean(x q) / (mean(q²) + λ). Means are over
    a row and gradients flow through all of them, so that the error of the codes is part of the derivative. With
    λ = 0 it is least squares; as λ grows it tends to the mean of the row (affine) or to 0 (linear). Sums instead of
    means, as the paper prints the linear form, are the same as λ / n.

    Args:
        x: what is to be approached.
        q: codes, on a scale of about 1, on which λ acts.
        scheme: with an intercept ("affine") or through the origin ("linear").
        lam: λ, in squared units of the codes.

    Returns:
        The regression at each position.

    Raises:
        InputError: the shapes differ, or an option is out of range.

    Source:
        "Robust Training of Neural Networks at Arbitrary Precision and Sparsity", arXiv 2409.09245.

    Example:
        >>> import torch
        >>> from assay.compress import ddt_denoise
        >>> ddt_denoise(torch.tensor([-1.5, -0.5, 0.5, 2.5]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        tensor([-0.9519, -0.9519,  1.4519,  1.4519])
    """
    for name, value in (("x", x), ("q", q)):
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
            raise InputError(f"{name} is {getattr(value, 'dtype', type(value).__name__)}: pass a floating-point tensor")
    if x.shape != q.shape or not x.ndim:
        raise InputError(f"x has shape {tuple(x.shape)} and q {tuple(q.shape)}: give one code for each value")
    _check_options(scheme, lam)
    return _denoised(x, q, scheme, lam)


def ddt(
    x: Float[Tensor, "..."],
    bits: float | None,
    *,
    scheme: Scheme = "affine",
    dim: int = -1,
    block: int | None = None,
    keep: Keep = None,
    lam: float = 0.01,
    estimator: Estimator = "ddt",
    detach_range: bool = False,
) -> Float[Tensor, "..."]:
    """Sparsifies, quantises and denoises a tensor, differentiably.

    Each block is sparsified (`keep`), brought to codes by rounding, whose derivative is taken to be that of the
    identity, and the *original* block is then regressed on the codes (`ddt_denoise`). Nothing in the regression is
    held constant. Codes, for n = 2^bits − 1:

    - affine: 0 … n over the range of the block; with 1 bit, 0 and 1 on either side of its mean.
    - linear: the odd numbers −n … n up to its largest magnitude; with 1 bit, the sign.
    - 1.5 bits: three codes, a mean magnitude apart.
    - with `keep`, whatever the scheme: 0 for what is left out and the linear codes for what is kept, so that a product
      can skip it. With `bits=None` what is kept goes in unrounded, in units of its block's root mean square.

    Statistics are computed in float32, in float64 for float64.

    Args:
        x: any shape and floating type.
        bits: 1 to 8, 1.5 for three levels, or None for sparsity alone.
        scheme: the regression, with an intercept ("affine") or without ("linear").
        dim: the dimension along which blocks lie: the one that a product sums over.
        block: values a block; None for the whole dimension.
        keep: (n, m) keeps the n largest magnitudes of every m consecutive values; a number in (0, 1) keeps that
            share of every block; None keeps all. Of equal magnitudes the first is kept.
        lam: the ridge λ, in squared units of the codes.
        estimator: "ddt", or "ste" for the straight-through estimator with the same codes: no regression, and a
            derivative of exactly 1.
        detach_range: hold the offset and the step of the rounding constant in the backward pass.

    Returns:
        A tensor like `x`.

    Raises:
        InputError: `x` is not floating, is empty or has non-finite entries (not checked while compiling), its
            dimension is no multiple of the block, or an option is out of range.

    Source:
        "Robust Training of Neural Networks at Arbitrary Precision and Sparsity", arXiv 2409.09245. The ranges of the
        rounding for two and more bits, and the codes of kept values, are choices made here.

    Example:
        >>> import torch
        >>> from assay.compress import ddt
        >>> x = torch.tensor([-1.5, -0.5, 0.5, 2.5], requires_grad=True)
        >>> ddt(x, 1).detach()
        tensor([-0.9519, -0.9519,  1.4519,  1.4519])
        >>> ddt(x, 1, scheme="linear", keep=(2, 4), lam=0.0).detach()
        tensor([-2.,  0.,  0.,  2.])
    """
    quantiser = Quantiser(bits, scheme, block, keep, lam, estimator, detach_range)
    moved = _checked(x, dim)
    quantiser.check_length(moved.shape[-1], f"dimension {dim} of x, of shape {tuple(x.shape)}, is")
    return quantiser(moved).movedim(-1, dim)


@dataclass(frozen=True)
class Quantiser:
    """The options of `ddt`, checked once, as a function of tensors whose blocks lie along the last dimension."""

    bits: float | None
    scheme: Scheme = "affine"
    block: int | None = None
    keep: Keep = None
    lam: float = 0.01
    estimator: Estimator = "ddt"
    detach_range: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.bits, int) and not isinstance(self.bits, bool) and 1 <= self.bits <= 8
        if not (whole or self.bits is None or self.bits == _TERNARY):
            raise InputError(f"bits is {self.bits!r}: use a whole number from 1 to 8, 1.5 for three levels, or None")
        _check_options(self.scheme, self.lam)
        if self.estimator not in ("ddt", "ste"):
            raise InputError(f'estimator is {self.estimator!r}: use "ddt" or "ste"')
        block = self.block
        if block is not None and (not isinstance(block, int) or isinstance(block, bool) or block < 2):
            raise InputError(f"block is {block!r}: use a whole number of at least 2, or None for the whole dimension")
        _check_keep(self.keep)
        if self.bits is None and self.keep is None:
            raise InputError("bits and keep are both None: there is nothing to quantise and nothing to leave out")

    @property
    def centred(self) -> bool:
        """Whether codes lie on both sides of 0, which stands for the value 0."""
        return self.scheme == "linear" or self.keep is not None

    @property
    def density(self) -> float:
        """The share of values that is kept."""
        if isinstance(self.keep, tuple):
            return self.keep[0] / self.keep[1]
        return 1.0 if self.keep is None else self.keep

    def check_length(self, n: int, what: str) -> None:
        """Refuses a dimension that blocks or groups do not fill; `what` names it, with its verb."""
        if self.block is not None and n % self.block:
            raise InputError(f"{what} {n} long, not a multiple of block {self.block}: choose a block that divides it")
        if isinstance(self.keep, tuple):
            group, size = self.keep[1], self.block or n
            if size % group:
                raise InputError(
                    f"{what} {n} long in blocks of {size}, not a multiple of the {group} of keep={self.keep}"
                )

    def __call__(self, x: Tensor) -> Tensor:
        blocks = self._blocks(x)
        q, step, offset, _ = self._codes(blocks)
        if self.estimator == "ste":
            value = q.detach() * step.detach()
            out = _held(value if self.centred else value + offset.detach(), blocks)
        else:
            out = _denoised(blocks, q, self.scheme, self.lam)
        return out.view(x.shape).to(x.dtype)

    @torch.no_grad()
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Codes [*rows, blocks, n], their slope, what is added to it (or None), and which values are kept (or None)."""
        blocks = self._blocks(x)
        q, step, offset, mask = self._codes(blocks)
        if self.estimator == "ste":
            return q, step, None if self.centred else offset, mask
        slope, mean, _ = _regress(blocks, q, self.scheme, self.lam)
        return q, slope, mean, mask

    def decode(self, q: Tensor, slope: Tensor, mean: Tensor | None) -> Tensor:
        """What `encode` gave turned back, to the last bit as the transform gives it."""
        if self.estimator == "ste":
            return q * slope if mean is None else q * slope + mean
        return _decoded(q, slope, mean, None if mean is None else q.mean(-1, keepdim=True))

    def _blocks(self, x: Tensor) -> Tensor:
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        # Contiguous, so that sums do not depend on the layout.
        return x.to(kind).reshape(*x.shape[:-1], -1, self.block or x.shape[-1]).contiguous()

    def _codes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Codes, whose derivative is that of what was rounded, their step and offset, and what is kept."""
        mask = None if self.keep is None else _mask(x.detach(), self.keep)
        kept = x if mask is None else _held(x * mask, x)
        count: Any = x.shape[-1] if mask is None else mask.sum(-1, keepdim=True)
        zero = x.new_zeros(())
        if self.bits is None:
            # Of order 1, as λ expects it, whatever the scale of the weights.
            step = torch.linalg.vector_norm(kept, dim=-1, keepdim=True) / count**0.5
            return *self._scaled(kept, step, zero), mask
        n = 2 if self.bits == _TERNARY else 2 ** int(self.bits) - 1
        if not self.centred:
            step, offset = self._affine_range(x, n)
            f, step, offset = self._scaled(x, step, offset)
            return _held(f.round().clamp(0, n), f), step, offset, mask
        size = kept.abs()
        mean = size.sum(-1, keepdim=True) / count
        step = mean if self.bits in (1, _TERNARY) else size.amax(-1, keepdim=True) / n
        f, step, offset = self._scaled(kept, step, zero)
        if self.bits == _TERNARY:
            rounded = f.round().clamp(-1, 1)
        else:
            rounded = (2 * (f / 2).floor() + 1).clamp(-n, n)
        return _held(rounded if mask is None else rounded * mask, f), step, offset, mask

    def _affine_range(self, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        if self.bits in (1, _TERNARY):
            mean = x.mean(-1, keepdim=True)
            spread = (x - mean).abs().mean(-1, keepdim=True)
            step = 2 * spread if self.bits == 1 else spread
            return step, mean - step * (n / 2)
        low, high = x.aminmax(dim=-1, keepdim=True)
        return (high - low) / n, low

    def _scaled(self, x: Tensor, step: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.detach_range:
            step, offset = step.detach(), offset.detach()
        # A block without spread has no step, and any will do.
        divisor = torch.where(step > torch.finfo(step.dtype).tiny, step, 1.0)
        return (x - offset) / divisor, step, offset


class _Held(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, through: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def _held(value: Tensor, through: Tensor) -> Tensor:
    """Exactly `value`, with the derivative of `through`."""
    held: Tensor = _Held.apply(value.detach(), through)
    return held


def _regress(x: Tensor, q: Tensor, scheme: Scheme, lam: float) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The slope and, of an affine regression, the means of `x` and of the codes."""
    if scheme == "linear":
        return (x * q).mean(-1, keepdim=True) / _nonzero(q.square().mean(-1, keepdim=True) + lam), None, None
    code, mean = q.mean(-1, keepdim=True), x.mean(-1, keepdim=True)
    centred = q - code
    # Both are centred: the product of a large mean with the rounding error of the other sum would swamp it.
    covariance = (centred * (x - mean)).mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True) + lam
    return covariance / _nonzero(variance), mean, code


def _nonzero(variance: Tensor) -> Tensor:
    """A variance to divide by: without a ridge, codes that are all equal would give 0 / 0."""
    return torch.where(variance > 0, variance, 1.0)


def _decoded(q: Tensor, slope: Tensor, mean: Tensor | None, code: Tensor | None) -> Tensor:
    return slope * q if mean is None or code is None else torch.addcmul(mean, slope, q - code)


class _Denoise(torch.autograd.Function):
    """The regression with its derivative written out: a third of the passes over memory, and nothing kept but x and q.

    Everything is computed from x and q again, so that the derivative can be differentiated in turn.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, q: Tensor, scheme: Scheme, lam: float) -> Tensor:
        return _decoded(q, *_regress(x, q, scheme, lam))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Scheme, float], output: Tensor) -> None:
        x, q, ctx.scheme, ctx.lam = inputs
        ctx.save_for_backward(x, q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        # With centred x, q and gradient g, d = Var(q) + λ and r = mean(g q) / d:
        # ∂x = ḡ + r q and ∂q = s g + r (x − 2 s q). The linear form is the same without centring.
        x, q = ctx.saved_tensors
        flat: Tensor | float = 0.0
        if ctx.scheme == "affine":
            flat = grad.mean(-1, keepdim=True)
            x, q, grad = x - x.mean(-1, keepdim=True), q - q.mean(-1, keepdim=True), grad - flat
        d = _nonzero(q.square().mean(-1, keepdim=True) + ctx.lam)
        slope, ratio = ((side * q).mean(-1, keepdim=True) / d for side in (x, grad))
        to_x = ratio * q + flat if ctx.needs_input_grad[0] else None
        to_q = slope * grad + ratio * (x - 2 * slope * q) if ctx.needs_input_grad[1] else None
        return to_x, to_q, None, None


def _denoised(x: Tensor, q: Tensor, scheme: Scheme, lam: float) -> Tensor:
    out: Tensor = _Denoise.apply(x, q, scheme, lam)
    return out


def _mask(x: Tensor, keep: tuple[int, int] | float) -> Bool[Tensor, "*blocks n"]:
    if isinstance(keep, tuple):
        n, group = keep
        size = x.abs().unflatten(-1, (-1, group))
    else:
        size = x.abs()
        n = max(1, round(keep * size.shape[-1]))
    order = size.argsort(dim=-1, descending=True, stable=True)[..., :n]
    return torch.zeros_like(size, dtype=torch.bool).scatter(-1, order, True).view(x.shape)


def _checked(x: Tensor, dim: int) -> Tensor:
    """The tensor with a dimension moved to the end, once it is known to hold numbers."""
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        raise InputError(f"x is {getattr(x, 'dtype', type(x).__name__)}: pass a floating-point tensor")
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise InputError(f"dim is {dim!r}: x has shape {tuple(x.shape)}")
    if not x.numel():
        raise InputError(f"x of shape {tuple(x.shape)} is empty: there is nothing to quantise")
    if not torch.compiler.is_compiling():
        bad = x.numel() - int(torch.isfinite(x).sum())
        if bad:
            raise InputError(f"x has {bad} non-finite entries: repair them first")
    return x.movedim(dim, -1)


def _check_options(scheme: object, lam: float) -> None:
    if scheme not in ("affine", "linear"):
        raise InputError(f'scheme is {scheme!r}: use "affine" or "linear"')
    if not (isinstance(lam, int | float) and 0 <= lam < math.inf):
        raise InputError(f"lam is {lam!r}: give a number from 0")


def _check_keep(keep: object) -> None:
    if keep is None or (isinstance(keep, float) and 0 < keep < 1):
        return
    if isinstance(keep, tuple) and len(keep) == 2 and all(isinstance(k, int) for k in keep) and 0 < keep[0] < keep[1]:
        return
    raise InputError(f"keep is {keep!r}: use (n, m) with 0 < n < m, such as (2, 4), or a share between 0 and 1")


# ---- codes and their product ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DDTCodes:
    """A tensor as integers: x̂ = slope · (code − mean_code) + mean, block by block.

    Attributes:
        codes: [*rows, n].
        slope: of the regression, [*rows, blocks], in units of the tensor.
        mean: of the decoded values of a block, [*rows, blocks], in units of the tensor.
        mean_code: of the codes of a block, [*rows, blocks].
    """

    codes: Int16[Tensor, "*rows n"]
    slope: Float[Tensor, "*rows blocks"]
    mean: Float[Tensor, "*rows blocks"]
    mean_code: Float[Tensor, "*rows blocks"]

    @property
    def block(self) -> int:
        """Codes a block."""
        return self.codes.shape[-1] // self.slope.shape[-1]

    def dequantize(self) -> Float[Tensor, "*rows n"]:
        """What the codes stand for."""
        q = self.codes.to(self.slope.dtype).unflatten(-1, (-1, self.block))
        return torch.addcmul(self.mean[..., None], self.slope[..., None], q - self.mean_code[..., None]).flatten(-2)


def ddt_codes(
    x: Float[Tensor, "*rows n"],
    bits: float,
    *,
    scheme: Scheme = "affine",
    block: int | None = None,
    keep: Keep = None,
    lam: float = 0.01,
) -> DDTCodes:
    """What `ddt` makes of a tensor, as integer codes and three constants a block.

    Args:
        x: a tensor whose blocks lie along the last dimension.
        bits: see `ddt`.
        scheme: see `ddt`.
        block: see `ddt`.
        keep: see `ddt`.
        lam: see `ddt`.

    Returns:
        The codes; `dequantize` gives `ddt(x, …)`.

    Raises:
        InputError: as `ddt`; or `bits` is None, which leaves no integers.

    Source:
        "Robust Training of Neural Networks at Arbitrary Precision and Sparsity", arXiv 2409.09245.

    Example:
        >>> import torch
        >>> from assay.compress import ddt_codes
        >>> ddt_codes(torch.tensor([-1.5, -0.5, 0.5, 2.5]), 2).codes
        tensor([0, 1, 2, 3], dtype=torch.int16)
    """
    if bits is None:
        raise InputError("bits is None: values that are only made sparse have no codes")
    quantiser = Quantiser(bits, scheme, block, keep, lam)
    x = _checked(x, -1)
    quantiser.check_length(x.shape[-1], f"last dimension of x, of shape {tuple(x.shape)}, is")
    q, slope, mean, _ = quantiser.encode(x)
    code = q.mean(-1, keepdim=True)
    constants = (c.squeeze(-1) for c in (slope, slope * code if mean is None else mean, code))
    return DDTCodes(q.flatten(-2).to(torch.int16), *constants)


def ddt_matmul(x: DDTCodes, w: DDTCodes) -> Float[Tensor, "*tokens out"]:
    """The product of two tensors of codes, X̂ Ŵᵀ, from one product of integers a block and two rank-one terms.

    (s_X s_Wᵀ) ∘ (Q_X Q_Wᵀ − n q̄_X q̄_Wᵀ) + n x̄ w̄ᵀ, summed over blocks of n: the terms with a mean of one and the
    codes of the other cancel, since codes less their mean sum to 0. Here the integers are multiplied as floats of
    the constants' type, which float32 holds exactly up to 2^24; a kernel for integers would take their place.

    Args:
        x: activations, [*tokens, n].
        w: weights, [out, n].

    Returns:
        [*tokens, out], in the type of the constants.

    Raises:
        InputError: lengths or blocks differ.

    Source:
        "Robust Training of Neural Networks at Arbitrary Precision and Sparsity", arXiv 2409.09245.

    Example:
        >>> import torch
        >>> from assay.compress import ddt_codes, ddt_matmul
        >>> x, w = torch.randn(2, 8), torch.randn(3, 8)
        >>> exact = ddt_codes(x, 4).dequantize() @ ddt_codes(w, 1).dequantize().T
        >>> torch.allclose(ddt_matmul(ddt_codes(x, 4), ddt_codes(w, 1)), exact, atol=1e-5)
        True
    """
    if w.codes.ndim != 2 or x.codes.shape[-1] != w.codes.shape[1] or x.block != w.block:
        raise InputError(
            f"codes of shape {tuple(x.codes.shape)} in blocks of {x.block} and {tuple(w.codes.shape)} in blocks of "
            f"{w.block}: give [*tokens, n] and [out, n] in blocks of one size"
        )
    n, kind = x.block, x.slope.dtype
    rows = x.codes.reshape(-1, x.codes.shape[-1])
    constants = [c.reshape(len(rows), -1) for c in (x.slope, x.mean, x.mean_code)]
    total = torch.zeros(len(rows), len(w.codes), dtype=kind, device=rows.device)
    # Block by block: all products at once would take as many times the memory of the result as there are blocks.
    for b in range(w.slope.shape[1]):
        at = slice(b * n, (b + 1) * n)
        slope, mean, code = (c[:, b] for c in constants)
        integers = rows[:, at].to(kind) @ w.codes[:, at].to(kind).T
        total += torch.outer(slope, w.slope[:, b]) * (integers - n * torch.outer(code, w.mean_code[:, b]))
        total += n * torch.outer(mean, w.mean[:, b])
    return total.view(*x.codes.shape[:-1], -1)


# ---- layers ------------------------------------------------------------------------------------------------------


class DDTLinear(nn.Linear):
    """A linear layer that trains with weights and inputs of few bits.

    It keeps its weight in full and takes codes anew at each call, so the optimiser, `state_dict` and checkpoints of an
    `nn.Linear` fit unchanged. Blocks lie along the inputs, those of activations within a token. Non-finite values
    pass through, for the training loop to deal with. Statistics are in float32 under autocast and in half precision.

    Args:
        in_features: inputs.
        out_features: outputs.
        bias: whether it has a bias, which stays in full precision.
        device: where to make the weight.
        dtype: the type of the weight.
        w_bits: of a weight: 1 to 8, 1.5, or None.
        a_bits: of an input: 1 to 8, 1.5, or None.
        keep: which weights to keep, (n, m) or a share; see `ddt`.
        scheme: see `ddt`; "linear" is for inputs that are centred, which those behind a ReLU are not.
        block: inputs a block; None for all.
        lam: see `ddt`.
        estimator: "ddt", or "ste" for the straight-through estimator.
        detach_range: see `ddt`.

    Raises:
        InputError: an option is out of range or does not fit `in_features`.

    Source:
        "Robust Training of Neural Networks at Arbitrary Precision and Sparsity", arXiv 2409.09245.

    Example:
        >>> import torch
        >>> from assay.compress import DDTLinear
        >>> layer = DDTLinear(64, 8, w_bits=1, a_bits=4)
        >>> layer(torch.randn(2, 64)).shape
        torch.Size([2, 8])
        >>> layer.export().packed.bits_per_weight
        2.0
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        w_bits: float | None = 1,
        a_bits: float | None = 4,
        keep: Keep = None,
        scheme: Scheme = "affine",
        block: int | None = None,
        lam: float = 0.01,
        estimator: Estimator = "ddt",
        detach_range: bool = False,
    ) -> None:
        how = (lam, estimator, detach_range)
        self_weight = None if w_bits is None and keep is None else Quantiser(w_bits, scheme, block, keep, *how)
        self_input = None if a_bits is None else Quantiser(a_bits, scheme, block, None, *how)
        if self_weight is None and self_input is None:
            raise InputError("w_bits, a_bits and keep are all None: use nn.Linear")
        for quantiser in (self_weight, self_input):
            if quantiser is not None:
                quantiser.check_length(in_features, "in_features is")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.weight_quantiser, self.input_quantiser = self_weight, self_input

    def forward(self, input: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """The layer's output."""
        weight = self.weight if self.weight_quantiser is None else self.weight_quantiser(self.weight)
        if self.input_quantiser is not None:
            input = self.input_quantiser(input)
        return F.linear(input, weight, self.bias)

    def export(self, scale_dtype: torch.dtype = torch.float32) -> DDTPackedLinear:
        """The layer as it computes now, frozen, with its weights as packed codes.

        Args:
            scale_dtype: how the constants of a block are stored; float32 computes what this layer does, bfloat16 takes
                half as much.

        Raises:
            NotApplicable: its weights have no codes (`w_bits` is None).
            InputError: its weight has non-finite entries.
        """
        quantiser = self.weight_quantiser
        if quantiser is None or quantiser.bits is None:
            raise NotApplicable("w_bits is None: there are no codes to pack")
        packed = DDTWeight.of(_checked(self.weight.detach(), -1), quantiser, scale_dtype)
        return DDTPackedLinear(packed, self.bias, self.input_quantiser).train(self.training)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        w, a = self.weight_quantiser, self.input_quantiser
        parts = [super().extra_repr(), f"w_bits={w and w.bits}", f"a_bits={a and a.bits}"]
        either = w or a
        if w is not None and w.keep is not None:
            parts.append(f"keep={w.keep}")
        if either is not None:
            parts += [f"scheme={either.scheme}", f"block={either.block}", f"estimator={either.estimator}"]
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class DDTWeight:
    """A matrix as it is stored: codes of kept weights without gaps, which ones those are, and constants of blocks.

    With (n, m), which ones are kept takes ⌈log2 C(m, n)⌉ bits a group, 3 for 2:4; beyond 8 bits, and for a share of each
    block, one bit a weight.

    Attributes:
        codes: of the kept weights of each row, counted from 0; 2 bits for three levels.
        mask: numbers of patterns, or a bit map; None where all are kept.
        slope: [out, blocks].
        mean: of the weights of a block (with the straight-through estimator the value of code 0), [out, blocks]; None
            where values are multiples of the slope. The mean of the codes is taken from the codes.
        quantiser: how it was made.
        shape: out and in.
    """

    codes: UInt8[Tensor, "out bytes"]
    mask: UInt8[Tensor, "out bytes"] | None
    slope: Float[Tensor, "out blocks"]
    mean: Float[Tensor, "out blocks"] | None
    quantiser: Quantiser
    shape: torch.Size

    @classmethod
    def of(cls, weight: Float[Tensor, "out in"], quantiser: Quantiser, scale_dtype: torch.dtype) -> DDTWeight:
        """Quantise and pack a matrix."""
        q, slope, mean, mask = quantiser.encode(weight)
        width, low, stride = _layout(quantiser)
        codes = ((q - low) / stride).flatten(-2).to(torch.int16)
        if mask is not None:
            mask = mask.flatten(-2)
            codes = codes[mask].view(len(codes), -1)
        return cls(
            pack(codes, width),
            None if mask is None else _pack_mask(mask, quantiser.keep),
            slope.squeeze(-1).to(scale_dtype),
            None if mean is None else mean.squeeze(-1).to(scale_dtype),
            quantiser,
            weight.shape,
        )

    @property
    def code_bits(self) -> float:
        """Bits of codes over all weights: what is said of a width where the mask is not counted."""
        return 8 * self.codes.nbytes / self.shape.numel()

    @property
    def mask_bits(self) -> float:
        """Bits over all weights that say which are kept."""
        return 0.0 if self.mask is None else 8 * self.mask.nbytes / self.shape.numel()

    @property
    def bits_per_weight(self) -> float:
        """All stored bits over all weights: codes, mask and constants."""
        constants = self.slope.nbytes + (0 if self.mean is None else self.mean.nbytes)
        return self.code_bits + self.mask_bits + 8 * constants / self.shape.numel()

    def dequantize(self) -> Float[Tensor, "out in"]:
        """The matrix, float32."""
        n = self.shape[1]
        width, low, stride = _layout(self.quantiser)
        if self.mask is None:
            q = unpack(self.codes, width, n).float() * stride + low
        else:
            mask = _unpack_mask(self.mask, self.quantiser.keep, n)
            kept = unpack(self.codes, width, _kept(self.quantiser, n)).float() * stride + low
            q = torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, kept)
        mean = None if self.mean is None else self.mean[..., None].float()
        q = q.unflatten(-1, (self.slope.shape[1], -1))
        return self.quantiser.decode(q, self.slope[..., None].float(), mean).flatten(-2)


def _layout(quantiser: Quantiser) -> tuple[int, int, int]:
    """Bits of a stored code, the lowest code and the distance of codes."""
    bits = quantiser.bits
    if bits == _TERNARY:
        return 2, -1 if quantiser.centred else 0, 1
    width = int(bits or 0)
    return (width, 1 - 2**width, 2) if quantiser.centred else (width, 0, 1)


def _kept(quantiser: Quantiser, n: int) -> int:
    """How many weights of a row of `n` are kept."""
    if isinstance(quantiser.keep, tuple):
        return n // quantiser.keep[1] * quantiser.keep[0]
    block = quantiser.block or n
    return n // block * max(1, round(quantiser.density * block))


def _by_number(keep: Keep) -> int | None:
    """Bits of the number of a pattern; None where a bit map is kept."""
    if isinstance(keep, tuple) and (patterns := math.comb(keep[1], keep[0])) <= _MOST_PATTERNS:
        return (patterns - 1).bit_length()
    return None


@cache
def _patterns(n: int, group: int) -> Tensor:
    """All patterns of n out of a group, [patterns, group], in the order of Σ C(position_i, i + 1)."""
    found = sorted(combinations(range(group), n), key=lambda p: p[::-1])
    out = torch.zeros(len(found), group, dtype=torch.bool)
    return out.scatter(1, torch.tensor(found), True)


def _pack_mask(mask: Bool[Tensor, "out in"], keep: Keep) -> Tensor:
    width = _by_number(keep)
    if width is None or not isinstance(keep, tuple):
        return pack(mask.to(torch.uint8), 1)
    n, group = keep
    position = mask.nonzero()[:, 1].view(len(mask), -1, n) % group
    table = torch.tensor([[math.comb(p, i + 1) for i in range(n)] for p in range(group)], device=mask.device)
    return pack(table[position, torch.arange(n, device=mask.device)].sum(-1), width)


def _unpack_mask(packed: Tensor, keep: Keep, n: int) -> Bool[Tensor, "rows in"]:
    width = _by_number(keep)
    if width is None or not isinstance(keep, tuple):
        return unpack(packed, 1, n).bool()
    number = unpack(packed, width, n // keep[1]).int()
    return _patterns(*keep).to(packed.device)[number].flatten(-2)


class DDTPackedLinear(nn.Linear):
    """What `DDTLinear.export` gives: a frozen layer over packed codes, decoded as it is used.

    Inputs are quantised as in training. It counts as an `nn.Linear`; reading `weight` decodes a copy. Its `state_dict`
    holds the packed form and loads into a layer that was exported from one of the same shape and options.

    Args:
        packed: the weight.
        bias: the bias, [out], or None.
        input_quantiser: what is done to inputs, or None.

    Example:
        >>> import torch
        >>> from assay.compress import DDTLinear
        >>> trained = DDTLinear(64, 8, w_bits=1, a_bits=None, keep=(1, 4), scheme="linear")
        >>> packed = trained.export().packed
        >>> packed.code_bits, packed.mask_bits, packed.bits_per_weight
        (0.25, 0.5, 1.25)
    """

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self, packed: DDTWeight, bias: Float[Tensor, " out"] | None = None, input_quantiser: Quantiser | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = packed.shape
        for name in _BUFFERS:
            self.register_buffer(name, getattr(packed, name))
        self.weight_quantiser, self.input_quantiser = packed.quantiser, input_quantiser
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    @property
    def packed(self) -> DDTWeight:
        """The weight in its packed form; shares the layer's memory."""
        buffers: dict[str, Any] = {name: getattr(self, name) for name in _BUFFERS}
        return DDTWeight(
            **buffers, quantiser=self.weight_quantiser, shape=torch.Size((self.out_features, self.in_features))
        )

    @property
    def weight(self) -> Float[Tensor, "out in"]:  # type: ignore[override]
        """The weight, decoded afresh at each reading, float32."""
        return self.packed.dequantize()

    def forward(self, input: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """The layer's output: with constants in float32, to the last bit that of the trained layer."""
        if self.input_quantiser is not None:
            input = self.input_quantiser(input)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DDTPackedLinear:
        # `.to(dtype)` and `.half()` must not round the constants.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        a = self.input_quantiser
        return f"{super().extra_repr()}, a_bits={a and a.bits}, bits_per_weight={self.packed.bits_per_weight:.3f}"


_BUFFERS = ("codes", "mask", "slope", "mean")


# ---- rewriting ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DDTLayer:
    """What one layer takes.

    Attributes:
        name: the layer's name in the model.
        shape: out and in.
        w_bits: of a weight's code; 16 where weights are not quantised.
        a_bits: of an input's code; 16 where inputs are not quantised.
        density: the share of weights that is kept.
        code_bits: stored bits of codes over all weights.
        mask_bits: stored bits over all weights that say which are kept.
        bits_per_weight: all stored bits over all weights, constants included.
    """

    name: str
    shape: tuple[int, int]
    w_bits: float
    a_bits: float
    density: float
    code_bits: float
    mask_bits: float
    bits_per_weight: float

    @property
    def n_weights(self) -> int:
        """How many weights the layer has."""
        return math.prod(self.shape)

    @property
    def work(self) -> float:
        """Density × bits of weights × bits of inputs, over 16 × 16: a proxy of energy, not a measurement."""
        return self.density * self.w_bits * self.a_bits / 256


@dataclass(frozen=True)
class DDTResult(Result):
    """What quantised layers take to store and, roughly, to compute.

    Attributes:
        layers: one entry a layer.
        left: the linear layers that were left as they were, with the reason.
        kept_parameters: parameters of the model outside the weights of these layers.
    """

    layers: tuple[DDTLayer, ...]
    left: dict[str, str]
    kept_parameters: int

    def _mean(self, name: str) -> float:
        return sum(getattr(layer, name) * layer.n_weights for layer in self.layers) / self.n_weights

    @property
    def n_weights(self) -> int:
        """Weights of the layers, kept or not."""
        return sum(layer.n_weights for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        """All stored bits over all weights: codes, masks and constants."""
        return self._mean("bits_per_weight")

    @property
    def bits_without_mask(self) -> float:
        """The same less the masks, which is what a width below the codes' leaves out."""
        return self.bits_per_weight - self._mean("mask_bits")

    @property
    def work(self) -> float:
        """Density × bits of weights × bits of inputs, over 16 × 16, weighted by multiplications."""
        return self._mean("work")

    def table(self) -> Table:
        """One row a layer, and the total."""
        columns = (
            Column("layer"),
            Column("weights", about="how many, kept or not"),
            Column("bits of a weight", "bit"),
            Column("bits of an input", "bit"),
            Column("density", about="share of weights that is kept"),
            Column("codes", "bit", "stored bits of codes over all weights"),
            Column("mask", "bit", "stored bits over all weights that say which are kept"),
            Column("stored", "bit", "all stored bits over all weights, constants included"),
            Column("work", about="density × bits × bits, over 16 × 16"),
        )
        names = ("n_weights", "w_bits", "a_bits", "density", "code_bits", "mask_bits", "bits_per_weight", "work")
        rows = [(layer.name, *(getattr(layer, n) for n in names)) for layer in self.layers]
        total = ("total", self.n_weights, *(self._mean(n) for n in names[1:]))
        return Table(columns, (*rows, total), "DDT layers")

    def figure(self) -> Figure:
        """Stored bits of each layer, in codes, masks and constants."""
        import plotly.graph_objects as go

        names = [layer.name for layer in self.layers]
        parts = {
            "codes": [layer.code_bits for layer in self.layers],
            "mask": [layer.mask_bits for layer in self.layers],
            "constants": [layer.bits_per_weight - layer.code_bits - layer.mask_bits for layer in self.layers],
        }
        figure = go.Figure([go.Bar(name=part, x=bits, y=names, orientation="h") for part, bits in parts.items()])
        figure.update_layout(
            barmode="stack",
            title=f"Stored in {self.bits_per_weight:.2f} bits a weight",
            xaxis_title="bits a weight",
            yaxis={"autorange": "reversed"},
            height=max(300, 120 + 18 * len(names)),
        )
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: the fields and the totals."""
        names = ("n_weights", "bits_per_weight", "bits_without_mask", "work")
        return super().to_dict() | {"total": {name: getattr(self, name) for name in names}}


def _described(name: str, layer: DDTLinear | DDTPackedLinear, scale_dtype: torch.dtype) -> DDTLayer:
    """What a layer takes, or would take once it is exported."""
    w, a = layer.weight_quantiser, layer.input_quantiser
    out, n = layer.out_features, layer.in_features
    if w is None or w.bits is None:
        codes = 16.0 * (w.density if w else 1.0)
        constants = 0.0
    else:
        width = _layout(w)[0]
        codes = 8 * packed_width(n if w.keep is None else _kept(w, n), width) / n
        each = 1 if w.scheme == "linear" or (w.estimator == "ste" and w.centred) else 2
        constants = each * (n // (w.block or n)) * 8 * scale_dtype.itemsize / n
    mask = 0.0
    if w is not None and w.keep is not None:
        number = _by_number(w.keep)
        groups = n // w.keep[1] if number and isinstance(w.keep, tuple) else n
        mask = 8 * packed_width(groups, number or 1) / n
    return DDTLayer(
        name=name,
        shape=(out, n),
        w_bits=16 if w is None or w.bits is None else w.bits,
        a_bits=16 if a is None or a.bits is None else a.bits,
        density=1.0 if w is None else w.density,
        code_bits=codes,
        mask_bits=mask,
        bits_per_weight=codes + mask + constants,
    )


def _result(
    model: nn.Module,
    layers: dict[str, Any],
    left: dict[str, str],
    scale_dtype: torch.dtype,
) -> DDTResult:
    described = tuple(_described(name or "weight", layer, scale_dtype) for name, layer in layers.items())
    total = sum(p.numel() for p in model.parameters())
    return DDTResult(described, left, total - sum(d.n_weights for d in described))


def ddt_convert(
    model: nn.Module,
    w_bits: float | None = 1,
    a_bits: float | None = 4,
    *,
    keep: Keep = None,
    skip: Iterable[str] = ("lm_head", "head"),
    scheme: Scheme = "affine",
    block: int | None = None,
    lam: float = 0.01,
    estimator: Estimator = "ddt",
    detach_range: bool = False,
) -> tuple[nn.Module, DDTResult]:
    """Replaces a model's linear layers by `DDTLinear`, to be trained as before.

    Every `nn.Linear` and every `Conv1D` of transformers is replaced, except those named in `skip` and those whose
    weight another module shares. The new layers hold the same parameters (a transposed copy for a `Conv1D`), so an
    optimiser made before still fits. Everything is checked before the first layer is swapped.

    Args:
        model: changed in place.
        w_bits: see `DDTLinear`.
        a_bits: see `DDTLinear`.
        keep: see `DDTLinear`.
        skip: layers to leave: a whole name, the name of a part that holds them, or the last piece of a name. The
            output layer should be among them.
        scheme: see `DDTLinear`.
        block: see `DDTLinear`.
        lam: see `DDTLinear`.
        estimator: see `DDTLinear`.
        detach_range: see `DDTLinear`.

    Returns:
        The model (a new layer if `model` is itself a linear layer), and what its layers will take.

    Raises:
        NotApplicable: there is no linear layer to replace.
        InputError: an option is out of range or does not fit a layer, or a weight has non-finite entries; the model
            is then unchanged.

    Source:
        "Robust Training of Neural Networks at Arbitrary Precision and Sparsity", arXiv 2409.09245.

    Example:
        >>> from torch import nn
        >>> from assay.compress import ddt_convert
        >>> model, result = ddt_convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), skip=["2"])
        >>> type(model[0]).__name__, type(model[2]).__name__, result.left
        ('DDTLinear', 'Linear', {'2': 'skipped by name'})
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"ddt_convert was given a {type(model).__name__}: pass a torch module")
    taken, left = linear_layers(model, skip)
    if not taken:
        raise NotApplicable(
            f"{type(model).__name__} has no linear layer to train in few bits ({len(left)} were left by name or shared)"
        )
    new: dict[str, nn.Module] = {}
    for name, layer in taken.items():
        weight = matrix(layer)
        try:
            made = DDTLinear(
                weight.shape[1],
                weight.shape[0],
                layer._parameters["bias"] is not None,
                "meta",
                w_bits=w_bits,
                a_bits=a_bits,
                keep=keep,
                scheme=scheme,
                block=block,
                lam=lam,
                estimator=estimator,
                detach_range=detach_range,
            )
            if not weight.is_meta:
                _checked(weight, -1)
        except InputError as error:
            raise InputError(f"layer {name or type(layer).__name__}: {error}") from None
        old = layer.get_parameter("weight")
        made.weight = nn.Parameter(weight.contiguous(), old.requires_grad) if is_conv1d(layer) else old
        made.register_parameter("bias", layer._parameters["bias"])
        new[name] = made.train(layer.training)
    result = _result(model, new, left, torch.float32)
    return swap(model, new), result


def ddt_export(model: nn.Module, *, scale_dtype: torch.dtype = torch.float32) -> tuple[nn.Module, DDTResult]:
    """Replaces a trained model's `DDTLinear` layers by frozen ones over packed codes.

    Args:
        model: changed in place, after all layers have been packed.
        scale_dtype: see `DDTLinear.export`.

    Returns:
        The model, and what its layers take.

    Raises:
        NotApplicable: it has no such layer, or one has no codes (`w_bits` is None).
        InputError: a weight has non-finite entries; the model is then unchanged.

    Example:
        >>> from torch import nn
        >>> from assay.compress import ddt_convert, ddt_export
        >>> model, _ = ddt_convert(nn.Sequential(nn.Linear(128, 16)), w_bits=1, keep=(1, 8), scheme="linear")
        >>> _, result = ddt_export(model)
        >>> result.bits_per_weight, result.bits_without_mask
        (0.75, 0.375)
    """
    found = {name: m for name, m in model.named_modules() if isinstance(m, DDTLinear)}
    if not found:
        raise NotApplicable(f"{type(model).__name__} has no DDTLinear layer: use ddt_convert first")
    new: dict[str, nn.Module] = {}
    for name, layer in found.items():
        try:
            new[name] = layer.export(scale_dtype)
        except (InputError, NotApplicable) as error:
            raise type(error)(f"layer {name or type(layer).__name__}: {error}") from None
    result = _result(model, new, {}, scale_dtype)
    return swap(model, new), result
