"""Uniform grids, and the rounding of a matrix to one with its errors made good by the columns that follow.

Sources: GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (arXiv 2210.17323);
SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot (arXiv 2301.00774).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor

from assay.core.errors import InputError
from assay.core.linalg import CholeskyResult, damped_cholesky

# Candidates of the clip search: the full range, then down to a fifth of it in steps of a hundredth.
_CLIPS = tuple(i / 100 for i in range(100, 20, -1))
# The exponent of the error that the clip search minimises: outliers count more than in a plain square.
_CLIP_NORM = 2.4
# Columns that are swept one by one before the rest of the matrix hears of it.
_SWEEP = 128
_CHUNK_VALUES = 1 << 18


@dataclass(frozen=True, eq=False)
class UniformGrid:
    """Evenly spaced levels `scale·(code − zero)` for every group of consecutive columns of every row.

    Attributes:
        scale: the distance of two levels, `[out, groups]`, float32.
        zero: the code of the value 0, a whole number; None where the grid is symmetric, which means 0.
        bits: codes run from −2^(bits−1) to 2^(bits−1) − 1.
        group_size: columns a group; the last group of a row may be shorter.
    """

    scale: Float[Tensor, "out groups"]
    zero: Float[Tensor, "out groups"] | None
    bits: int
    group_size: int

    @property
    def low(self) -> int:
        """The smallest code."""
        return -(2 ** (self.bits - 1))

    @property
    def high(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - 1) - 1

    def codes(self, weight: Float[Tensor, "out columns"], start: int = 0) -> Int8[Tensor, "out columns"]:
        """The nearest codes of some columns of a matrix.

        Args:
            weight: the columns.
            start: the number of the first of them in the matrix.
        """
        scale, zero = self._of_columns(start, weight.shape[1])
        codes = weight / scale
        codes = codes.round_() if zero is None else codes.add_(zero).round_()
        return codes.clamp_(self.low, self.high).to(torch.int8)

    def values(self, codes: Int8[Tensor, "out columns"], start: int = 0) -> Float[Tensor, "out columns"]:
        """What codes stand for; the arguments are as for `codes`."""
        scale, zero = self._of_columns(start, codes.shape[1])
        values = codes.to(scale.dtype)
        return values * scale if zero is None else (values - zero) * scale

    def nearest(self, weight: Float[Tensor, "out columns"], start: int = 0) -> Float[Tensor, "out columns"]:
        """The values on the grid that lie nearest."""
        scale, zero = self._of_columns(start, weight.shape[1])
        if zero is None:
            return (weight / scale).round_().clamp_(self.low, self.high).mul_(scale)
        return (weight / scale).add_(zero).round_().clamp_(self.low, self.high).sub_(zero).mul_(scale)

    def _of_columns(self, start: int, n: int) -> tuple[Tensor, Tensor | None]:
        if self.scale.shape[1] == 1:
            return self.scale, self.zero
        if n == 1:
            group = start // self.group_size
            at = slice(group, group + 1)
            return self.scale[:, at], None if self.zero is None else self.zero[:, at]
        index = torch.arange(start, start + n, device=self.scale.device) // self.group_size
        return self.scale[:, index], None if self.zero is None else self.zero[:, index]


def uniform_grid(
    weight: Float[Tensor, "out in"],
    *,
    bits: int = 4,
    group_size: int | None = None,
    symmetric: bool = True,
    clip_search: bool = True,
    importance: Float[Tensor, "in"] | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> UniformGrid:
    """The grid of each group of a matrix, with the range that costs its weights least.

    Args:
        weight: the matrix.
        bits: from 2 to 8.
        group_size: columns that share a scale; None for whole rows. Where it does not divide the width, the last
            group of each row is shorter.
        symmetric: levels around 0; otherwise a zero point is stored with each scale.
        clip_search: try ranges from the largest magnitude down to a fifth of it, and keep for each group the one
            with the least Σ importance·|w − ŵ|^2.4; otherwise the full range is taken.
        importance: the weight of each column in that sum; all alike by default.
        scale_dtype: what the scales are stored as; the grid is that of the rounded scales.

    Raises:
        InputError: an option is out of range, or the matrix has entries that are not finite.

    >>> weight = torch.tensor([[-7.0, 4.9, 3.2]])
    >>> uniform_grid(weight, clip_search=False).codes(weight)
    tensor([[-7,  5,  3]], dtype=torch.int8)
    """
    if not 2 <= bits <= 8:
        raise InputError(f"bits is {bits}: a uniform grid takes 2 to 8")
    n_out, n_in = weight.shape
    size = n_in if group_size is None else group_size
    if size < 1:
        raise InputError(f"group_size is {group_size}: give at least 1, or None for whole rows")
    work = weight.detach().float()
    if not bool(torch.isfinite(work.sum())):
        bad = int((~torch.isfinite(work)).sum())
        if bad:
            raise InputError(f"the weight has {bad} entries that are not finite: repair the checkpoint first")
    size = min(size, n_in)
    n_groups = -(-n_in // size)
    pad = n_groups * size - n_in
    # Zeros change neither the range (zero is always on the grid) nor the error.
    groups = torch.nn.functional.pad(work, (0, pad)).view(n_out, n_groups, size)
    cost = None
    if importance is not None:
        cost = torch.nn.functional.pad(importance.to(work), (0, pad)).view(n_groups, size)
    scale = work.new_empty(n_out, n_groups)
    zero = None if symmetric else torch.empty_like(scale)
    rows = max(1, _CHUNK_VALUES // max(1, n_groups * size))
    for start in range(0, n_out, rows):
        at = slice(start, start + rows)
        scale[at], found = _fit(groups[at], bits, symmetric, clip_search, cost, scale_dtype)
        if zero is not None:
            zero[at] = found
    return UniformGrid(scale, zero, bits, size)


def _fit(
    groups: Float[Tensor, "rows groups size"],
    bits: int,
    symmetric: bool,
    clip_search: bool,
    cost: Float[Tensor, "groups size"] | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    low_code, high_code = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    least = 1e-5 / high_code
    best_scale = best_zero = best = None
    for clip in _CLIPS if clip_search else (1.0,):
        if symmetric:
            scale = torch.maximum(high, -low) * (clip / high_code)
            zero = torch.zeros_like(scale)
        else:
            scale = (high - low) * (clip / (high_code - low_code))
        scale = scale.clamp(min=least).to(dtype).float()
        if not symmetric:
            zero = (low_code - low * clip / scale).round().clamp(low_code, high_code)
        if not clip_search:
            return scale, zero
        error = (groups / scale[..., None]).add_(zero[..., None]).round_().clamp_(low_code, high_code)
        error = error.sub_(zero[..., None]).mul_(scale[..., None]).sub_(groups).abs_().pow_(_CLIP_NORM)
        total = error.sum(-1) if cost is None else (error * cost).sum(-1)
        if best is None or best_scale is None or best_zero is None:
            best_scale, best_zero, best = scale, zero, total
        else:
            better = total < best
            best = torch.where(better, total, best)
            best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    assert best_scale is not None
    assert best_zero is not None
    return best_scale, best_zero


@dataclass(frozen=True, eq=False)
class Curvature:
    """What the error of a layer's output says about the errors of its weights: ΔHΔᵀ for each row Δ.

    Attributes:
        H: the Hessian with its damping, float64; dead inputs have a diagonal entry of the others' mean and are cut off.
        U: upper triangular with H⁻¹ = UᵀU, float64: column i hears of the columns before it through row i.
        dead: inputs that were always zero: their weights do nothing.
        report: what had to be done to the Hessian.
    """

    H: Float[Tensor, "in in"]
    U: Float[Tensor, "in in"]
    dead: Bool[Tensor, "in"]
    report: CholeskyResult

    @classmethod
    def of(cls, hessian: Float[Tensor, "in in"], damping: float = 0.01) -> Curvature:
        """From the second moments of a layer's inputs (times any constant), whatever their rank.

        Args:
            hessian: symmetric, positive semi-definite.
            damping: what to add to the diagonal, as a share of its mean over the inputs that are not dead.

        Raises:
            InputError: the Hessian is not square, finite, symmetric and positive semi-definite.
        """
        # The factor of the flipped matrix is, flipped back, an upper R with H = R Rᵀ, so that U is its inverse: no
        # inverse of H is formed.
        flipped = hessian.flip(0, 1)
        report = _factored(flipped, damping)
        R = report.factor.double().flip(0, 1)
        eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
        U = torch.linalg.solve_triangular(R, eye, upper=True)
        return cls(R @ R.T, U, report.dead.flip(0), report)


def _factored(matrix: Float[Tensor, "n n"], damping: float) -> CholeskyResult:
    """In float64; a matrix that was summed in less may be asymmetric and indefinite by the rounding of that."""
    if matrix.dtype == torch.float64:
        return damped_cholesky(matrix, damping)
    wide = matrix.double()
    loose = 4 * torch.finfo(matrix.dtype).eps ** 0.5
    if torch.allclose(wide, wide.mT, rtol=0.0, atol=loose * float(wide.diagonal().abs().max())):
        wide = (wide + wide.mT) / 2
    try:
        report = damped_cholesky(wide, damping)
    except InputError:
        return damped_cholesky(matrix, damping)
    return damped_cholesky(matrix, damping) if bool(report.n_clipped) else report


class Grid(Protocol):
    """Levels that a weight may take, perhaps other ones at every place of a matrix."""

    def nearest(self, weight: Float[Tensor, "out columns"], start: int = 0) -> Float[Tensor, "out columns"]:
        """The nearest levels of the columns from `start` on."""


def rtn(weight: Float[Tensor, "out in"], grid: UniformGrid) -> Int8[Tensor, "out in"]:
    """Codes of the nearest levels: round-to-nearest."""
    return grid.codes(weight.detach().float())


def sweep(
    weight: Float[Tensor, "out in"],
    curvature: Curvature,
    grid: Grid | None,
    *,
    mask: Bool[Tensor, "out in"] | Callable[[Tensor, int], Tensor] | None = None,
    start: int = 0,
) -> Float[Tensor, "out in"]:
    """Round columns from left to right; each one's error is made good by those that follow it.

    Args:
        weight: the matrix.
        curvature: of its inputs.
        grid: where to round to; None prunes without rounding.
        mask: False where a weight must be zero; or a function that says so for some columns, from what they have
            become when the sweep reaches them and the number of the first: SparseGPT chooses its mask that way.
        start: the first column; those before it are returned as they are.

    Returns:
        The matrix, from `start` on with values on the grid.
    """
    w = weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    U = curvature.U.to(w)
    n = w.shape[1]
    for begin in range(start, n, _SWEEP):
        stop = min(begin + _SWEEP, n)
        errors = w.new_empty(stop - begin, len(w))
        kept = mask(w[:, begin:stop], begin) if callable(mask) else None if mask is None else mask[:, begin:stop]
        for i in range(begin, stop):
            column = w[:, i]
            new = column if grid is None else grid.nearest(column[:, None], i)[:, 0]
            if kept is not None:
                new = new * kept[:, i - begin]
            error = (column - new) / U[i, i]
            w[:, i + 1 : stop].addr_(error, U[i, i + 1 : stop], alpha=-1)
            w[:, i] = new
            errors[i - begin] = error
        w[:, stop:].addmm_(errors.T, U[begin:stop, stop:], alpha=-1)
    return w


def refine(
    weight: Float[Tensor, "out in"],
    rounded: Float[Tensor, "out in"],
    curvature: Curvature,
    grid: Grid,
    *,
    mask: Bool[Tensor, "out in"] | None = None,
    sweeps: int = 4,
) -> Float[Tensor, "out in"]:
    """Coordinate descent on the codes: each weight in turn takes the level that is best for what the others are.

    The error ΔHΔᵀ of a row never rises.

    Args:
        weight: what the matrix was.
        rounded: values on the grid, such as `sweep` gives.
        curvature: of the matrix's inputs.
        grid: the levels.
        mask: False where a weight must stay zero.
        sweeps: how often each weight is looked at.
    """
    w = rounded.clone()
    H = curvature.H.to(w)
    n = w.shape[1]
    pull = (weight.detach().to(w) - w) @ H
    diagonal = H.diagonal()
    for _ in range(sweeps):
        for begin in range(0, n, _SWEEP):
            stop = min(begin + _SWEEP, n)
            steps = w.new_zeros(stop - begin, len(w))
            local = pull[:, begin:stop].clone()
            for i in range(begin, stop):
                new = grid.nearest((w[:, i] + local[:, i - begin] / diagonal[i])[:, None], i)[:, 0]
                if mask is not None:
                    new = new * mask[:, i]
                step = new - w[:, i]
                local.addr_(step, H[i, begin:stop], alpha=-1)
                w[:, i] = new
                steps[i - begin] = step
            pull.addmm_(steps.T, H[begin:stop], alpha=-1)
    return w


def gptq(
    weight: Float[Tensor, "out in"],
    hessian: Float[Tensor, "in in"],
    grid: Grid,
    *,
    mask: Bool[Tensor, "out in"] | None = None,
    damping: float = 0.01,
    rounds: int = 0,
) -> Float[Tensor, "out in"]:
    """Round a matrix to a grid so that its outputs on the calibration inputs change little.

    Args:
        weight: the matrix.
        hessian: second moments of its inputs, times any constant.
        grid: the levels.
        mask: False where a weight must be zero: one sweep then prunes and rounds, as SparseGPT does.
        damping: see `Curvature.of`.
        rounds: of coordinate descent afterwards (`refine`).

    Returns:
        Values on the grid, float32 (float64 for float64 weights).

    Raises:
        InputError: the Hessian does not fit, or is not finite, symmetric and positive semi-definite.

    Source:
        GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (arXiv 2210.17323), section 3.

    Example:
        >>> import torch
        >>> from assay.compress import gptq, output_error, uniform_grid
        >>> g = torch.Generator().manual_seed(0)
        >>> x, w = torch.randn(256, 16, generator=g) @ torch.randn(16, 16, generator=g), torch.randn(8, 16, generator=g)
        >>> grid = uniform_grid(w, bits=3)
        >>> rounded = gptq(w, x.T @ x, grid)
        >>> output_error(w, rounded, x.T @ x) < output_error(w, grid.nearest(w), x.T @ x)
        True
    """
    if weight.ndim != 2 or hessian.shape != (weight.shape[1], weight.shape[1]):
        raise InputError(f"the weight has shape {tuple(weight.shape)} and the Hessian {tuple(hessian.shape)}")
    curvature = Curvature.of(hessian, damping)
    values = sweep(weight, curvature, grid, mask=mask)
    return refine(weight, values, curvature, grid, mask=mask, sweeps=rounds)


def output_error(
    weight: Float[Tensor, "out in"], new: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"]
) -> float:
    """Squared error of a layer's output, as a share of the output's own square.

    Args:
        weight: what the weight was, `[out, in]`.
        new: what it is.
        hessian: second moments of the layer's inputs, times any constant.
    """
    delta, w, H = (new - weight).double(), weight.double(), hessian.double()
    size = float(((w @ H) * w).sum())
    return float(((delta @ H) * delta).sum()) / size if size else 0.0
