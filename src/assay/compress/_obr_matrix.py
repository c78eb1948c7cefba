"""Pruning and quantising one matrix together, each making good the other's errors.

Source: Optimal Brain Restoration for Joint Quantization and Sparsification of LLMs (arXiv 2509.11177).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay.compress._uniform import Curvature, UniformGrid, output_error, sweep, uniform_grid
from assay.core.errors import InputError
from assay.core.linalg import spd_solve
from assay.core.parallel import each_on_one_core
from assay.core.results import Column, Result, Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Scorer = Literal["wanda", "magnitude", "random", "sparsegpt"]
Rounding = Literal["gptq", "rtn"]

# Values of the systems of equations that are in memory at once, for each core: few enough for its cache; a GPU wants
# large launches.
_SYSTEM_VALUES = 1 << 20
_DEVICE_VALUES = 1 << 26


def parse_pattern(pattern: str | tuple[int, int] | None) -> tuple[int, int] | None:
    """ "2:4", or (2, 4): two of every four consecutive inputs are kept.

    Raises:
        InputError: it is not of that form, or keeps none or more than there are.

    >>> parse_pattern("2:4")
    (2, 4)
    """
    if pattern is None:
        return None
    try:
        kept, of = pattern.split(":") if isinstance(pattern, str) else pattern
        kept, of = int(kept), int(of)
    except (TypeError, ValueError):
        kept, of = 0, 0
    if not 0 < kept <= of:
        raise InputError(f"pattern is {pattern!r}: give kept:of, such as 2:4")
    return kept, of


def prune_mask(
    weight: Float[Tensor, "out in"],
    *,
    sparsity: float = 0.5,
    pattern: str | tuple[int, int] | None = None,
    scorer: Scorer = "wanda",
    hessian: Float[Tensor, "in in"] | None = None,
    curvature: Curvature | None = None,
    generator: torch.Generator | None = None,
) -> Bool[Tensor, "out in"]:
    """Which weights to keep: in every row the `int(in·sparsity)` with the lowest scores go.

    Args:
        weight: the matrix.
        sparsity: the share of each row that goes, from 0 to 1. Not used where there is a pattern.
        pattern: "kept:of": in every group of `of` consecutive inputs the `kept` with the highest scores stay.
        scorer: "wanda" scores |w|·√H_ii, "magnitude" |w|, "sparsegpt" w²/U_ii² with H⁻¹ = UᵀU, "random" by chance.
        hessian: for "wanda" and "sparsegpt".
        curvature: for "sparsegpt", where the caller has it.
        generator: for "random".

    Raises:
        InputError: an option is out of range, the pattern does not divide the width, or the scorer needs the Hessian.

    >>> prune_mask(torch.tensor([[1.0, -3.0, 2.0, 0.5]]), pattern="2:4", scorer="magnitude")
    tensor([[False,  True,  True, False]])
    """
    n = weight.shape[1]
    for given in (hessian, None if curvature is None else curvature.H):
        if given is not None and given.shape != (n, n):
            raise InputError(f"the weight has shape {tuple(weight.shape)} and the Hessian {tuple(given.shape)}")
    if scorer not in get_args(Scorer):
        raise InputError(f"scorer is {scorer!r}: use one of {', '.join(get_args(Scorer))}")
    if not 0 <= sparsity <= 1:
        raise InputError(f"sparsity is {sparsity}: give a share from 0 to 1")
    w = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if scorer == "random":
        scores = torch.rand(w.shape, generator=generator, device=w.device)
    elif scorer == "magnitude":
        scores = w.abs()
    elif hessian is None and curvature is None:
        raise InputError(f"scorer {scorer!r} needs the Hessian of the layer's inputs")
    elif scorer == "wanda":
        scores = w.abs() * _given(hessian, curvature).diagonal().to(w).clamp(min=0).sqrt()
        if not bool(torch.isfinite(scores).all()):
            raise InputError("the weight or the Hessian has entries that are not finite: find where they come from")
    else:
        curvature = Curvature.of(_given(hessian, None)) if curvature is None else curvature
        scores = (w / curvature.U.diagonal().to(w)).square()
    grouping = parse_pattern(pattern)
    if grouping is None:
        return _keep_top(scores, n - int(n * sparsity))
    kept, of = grouping
    if n % of:
        raise InputError(f"C_in={n} is not divisible by M={of}: choose another pattern, or leave the layer out")
    return _keep_top(scores.unflatten(1, (-1, of)), kept).flatten(1)


def _given(hessian: Tensor | None, curvature: Curvature | None) -> Tensor:
    if hessian is not None:
        return hessian
    assert curvature is not None
    return curvature.H


def _keep_top(scores: Float[Tensor, "*rows n"], kept: int) -> Bool[Tensor, "*rows n"]:
    # A stable sort, so that of equal scores the first stay, on every machine.
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(-1, order[..., :kept], True)


def restore(
    imposed: Float[Tensor, "out in"],
    free: Bool[Tensor, "out in"],
    H: Float[Tensor, "in in"],
) -> Float[Tensor, "out in"]:
    """The change of the free weights that best makes good a change imposed on others: −H_RR⁻¹ H_RE Δ_E for each row.

    Args:
        imposed: Δ_E, zero wherever nothing is imposed.
        free: R, the weights that may answer, a set of its own for every row.
        H: symmetric, positive definite.

    Returns:
        Δ_R, zero elsewhere; float32, or float64 where `imposed` is.

    Raises:
        InputError: H is not finite, or not positive semi-definite.

    Source:
        Optimal Brain Restoration (arXiv 2509.11177), group error compensation.

    >>> H = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    >>> restore(torch.tensor([[-1.0, 0.0, 0.0]]), torch.tensor([[False, True, True]]), H)
    tensor([[ 0.0000,  0.6667, -0.3333]])
    """
    imposed = imposed.to(torch.promote_types(imposed.dtype, torch.float32))
    exact, H = H, H.to(imposed)
    n_free = free.sum(1)
    width = int(n_free.max()) if len(free) else 0
    answer = torch.zeros_like(imposed)
    if not width:
        return answer
    wanted = -(imposed @ H)
    # The free columns of each row come first; rows with fewer of them than others are padded.
    index = torch.argsort(free.to(torch.uint8), dim=1, descending=True, stable=True)[:, :width]
    rows = max(1, (_SYSTEM_VALUES if H.device.type == "cpu" else _DEVICE_VALUES) // width**2)

    def solve(at: Tensor) -> None:
        columns = index[at]
        real = torch.arange(width, device=H.device) < n_free[at, None]
        right = wanted[at].gather(1, columns).masked_fill(~real, 0)[..., None]
        factor, info = torch.linalg.cholesky_ex(_systems(H, columns, real))
        solution = torch.cholesky_solve(right, factor)
        failed = info != 0
        if bool(failed.any()):
            # Positive definite by less than the rounding of float32.
            systems = _systems(exact.double(), columns[failed], real[failed])
            solution[failed] = spd_solve(systems, right[failed].double()).to(right.dtype)
        answer[at] = answer[at].scatter(1, columns, solution[..., 0].masked_fill(~real, 0))

    each_on_one_core(solve, torch.arange(len(free), device=H.device).split(rows))
    return answer


def _systems(
    H: Float[Tensor, "in in"], columns: Int[Tensor, "rows width"], real: Bool[Tensor, "rows width"]
) -> Float[Tensor, "rows width width"]:
    """H of each row's own columns; what is padding is cut off, with 1 on the diagonal."""
    systems = H[columns[:, :, None], columns[:, None, :]]
    if not bool(real.all()):
        systems = systems.masked_fill(~(real[:, :, None] & real[:, None, :]), 0)
        systems.diagonal(dim1=1, dim2=2).masked_fill_(~real, 1)
    return systems


@dataclass(frozen=True)
class ObrResult(Result):
    """What pruning and quantising cost one matrix.

    Attributes:
        mask: which weights are kept.
        grid: the levels, fitted to the matrix before it was pruned.
        error: squared error of the output on the calibration inputs, as a share of the output's own square.
        steps: the same after each step, if every weight were then rounded to the nearest level: pruned only, pruned
            and restored, rounding restored, final.
        clipped: the share of the kept weights that lie on an end of the grid after compensation.
        sparsity: the share of weights that are zero by the mask.
        n_dead: inputs that were always zero.
        n_clipped_directions: directions of the Hessian that were raised to be positive; 0 in the usual case.
    """

    mask: Bool[Tensor, "out in"]
    grid: UniformGrid
    error: float
    steps: dict[str, float]
    clipped: float
    sparsity: float
    n_dead: int
    n_clipped_directions: int

    def table(self) -> Table:
        """One row a step."""
        columns = (Column("step"), Column("output error", about="share of the output's square"))
        return Table(columns, tuple(self.steps.items()), f"{self.sparsity:.1%} pruned, {self.grid.bits} bits")

    def figure(self) -> Figure:
        """The output error after each step."""
        import plotly.graph_objects as go

        figure = go.Figure(go.Bar(x=list(self.steps), y=list(self.steps.values())))
        figure.update_layout(yaxis_title="squared output error, share of the output", yaxis_type="log")
        return figure

    def to_dict(self) -> dict[str, Any]:
        """The figures, without mask and grid."""
        return {
            "error": self.error,
            "steps": dict(self.steps),
            "clipped": self.clipped,
            "sparsity": self.sparsity,
            "bits": self.grid.bits,
            "group_size": self.grid.group_size,
            "n_dead": self.n_dead,
            "n_clipped_directions": self.n_clipped_directions,
        }


def obr_matrix(
    weight: Float[Tensor, "out in"],
    hessian: Float[Tensor, "in in"],
    *,
    sparsity: float = 0.5,
    pattern: str | tuple[int, int] | None = None,
    grid: UniformGrid | None = None,
    bits: int = 4,
    group_size: int | None = None,
    scorer: Scorer = "wanda",
    rounding: Rounding = "gptq",
    alpha: float = 0.5,
    damping: float = 0.01,
    clip_search: bool = True,
    mask: Bool[Tensor, "out in"] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Float[Tensor, "out in"], ObrResult]:
    """Prune and quantise a matrix so that its outputs on the calibration inputs change least.

    The weights that stay first answer for those that go. Then the kept weights left of a cut answer to nothing more and
    are rounded, those right of it make good the rounding error of the left, and are rounded in turn: to the nearest
    level, or column by column as GPTQ does.

    Args:
        weight: the matrix.
        hessian: second moments of its inputs, times any constant.
        sparsity: the share of each row that is pruned.
        pattern: "kept:of", such as "2:4", in place of `sparsity`.
        grid: the levels; by default one is fitted to the matrix as it is given, before anything is pruned.
        bits: of that grid.
        group_size: columns that share a scale in that grid; None for whole rows.
        scorer: see `prune_mask`.
        rounding: "gptq" or "rtn", for the weights right of the cut.
        alpha: where the cut is, as a share of the columns.
        damping: see `Curvature.of`.
        clip_search: see `uniform_grid`.
        mask: which weights to keep, in place of `sparsity`, `pattern` and `scorer`.
        generator: for the scorer "random".

    Returns:
        The matrix on the grid with the mask's zeros, in float32 (float64 for float64 weights), and what it cost.

    Raises:
        InputError: an option is out of range, the shapes do not fit, or a value is not finite.

    Source:
        Optimal Brain Restoration for Joint Quantization and Sparsification of LLMs (arXiv 2509.11177).

    Example:
        >>> import torch
        >>> from assay.compress import obr_matrix
        >>> g = torch.Generator().manual_seed(0)
        >>> x, w = torch.randn(256, 16, generator=g) @ torch.randn(16, 16, generator=g), torch.randn(8, 16, generator=g)
        >>> new, result = obr_matrix(w, x.T @ x)
        >>> int((new != 0).sum(1).max()), result.error < result.steps["pruned"]
        (8, True)
    """
    if rounding not in get_args(Rounding):
        raise InputError(f"rounding is {rounding!r}: use one of {', '.join(get_args(Rounding))}")
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha is {alpha}: give a share of the columns from 0 to 1")
    if weight.ndim != 2 or hessian.shape != (weight.shape[1], weight.shape[1]):
        raise InputError(f"the weight has shape {tuple(weight.shape)} and the Hessian {tuple(hessian.shape)}")
    w = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if grid is None:
        grid = uniform_grid(w, bits=bits, group_size=group_size, clip_search=clip_search)
    curvature = Curvature.of(hessian, damping)
    if mask is None:
        options: dict[str, Any] = {"sparsity": sparsity, "pattern": pattern, "scorer": scorer, "generator": generator}
        mask = prune_mask(w, hessian=hessian, curvature=curvature, **options)
    elif mask.shape != w.shape or mask.dtype != torch.bool:
        raise InputError(f"mask is {tuple(mask.shape)} of {mask.dtype}: give {tuple(w.shape)} of torch.bool")
    mask = mask & ~curvature.dead
    H = curvature.H
    steps = {"pruned": output_error(w, grid.nearest(w) * mask, hessian)}

    restored = w * mask + restore(-w * ~mask, mask, H)
    nearest = grid.nearest(restored) * mask
    steps["restored"] = output_error(w, nearest, hessian)

    cut = int(alpha * w.shape[1])
    right = torch.arange(w.shape[1], device=w.device) >= cut
    restored = restored + restore((nearest - restored) * ~right, mask & right, H)
    nearest = grid.nearest(restored) * mask
    steps["rounding restored"] = output_error(w, nearest, hessian)
    if rounding == "gptq":
        restored[:, :cut] = nearest[:, :cut]
        nearest = sweep(restored, curvature, grid, mask=mask, start=cut)
    steps["final"] = output_error(w, nearest, hessian)

    on_end = (grid.codes(nearest) == grid.low) | (grid.codes(nearest) == grid.high)
    n_kept = int(mask.sum())
    return nearest, ObrResult(
        mask=mask,
        grid=grid,
        error=steps["final"],
        steps=steps,
        clipped=float((on_end & mask).sum()) / n_kept if n_kept else 0.0,
        sparsity=1 - n_kept / mask.numel(),
        n_dead=int(curvature.dead.sum()),
        n_clipped_directions=int(curvature.report.n_clipped.sum()),
    )
