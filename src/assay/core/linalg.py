"""Linear algebra that survives real statistics: dead inputs, too few rows, rounding below zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from assay.core.errors import InputError


@dataclass(frozen=True)
class CholeskyResult:
    """A Cholesky factor, and what had to be done to the matrix to get it.

    Attributes:
        factor: lower triangular L with L Lᵀ = the matrix that was factored: H with `damping` added to its diagonal,
            the mean of the live diagonal in place of dead diagonal entries, and eigenvalues raised where clipped.
        damping: what was added to the diagonal, in the unit of H.
        dead: inputs whose diagonal entry is zero (never active); their rows and columns were cut off from the rest.
        n_clipped: how many eigenvalues of the damped matrix were raised to the rounding floor; 0 in the usual case.
        rank: how many directions of the live inputs were kept as they are: n - dead - clipped.
    """

    factor: Float[Tensor, "*batch n n"]
    damping: Float[Tensor, "*batch"]
    dead: Bool[Tensor, "*batch n"]
    n_clipped: Integer[Tensor, "*batch"]
    rank: Integer[Tensor, "*batch"]

    def solve(self, b: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n k"]:
        """The solution X of (L Lᵀ) X = b, with zeros for dead inputs."""
        return torch.cholesky_solve(b, self.factor).masked_fill(self.dead[..., None], 0.0)


def damped_cholesky(H: Float[Tensor, "*batch n n"], damping: float = 0.01) -> CholeskyResult:
    """The Cholesky factor of a symmetric positive semi-definite matrix, whatever its rank.

    Args:
        H: a Gram matrix, covariance or Hessian, or a batch of them. half precision is computed in float32.
        damping: what to add to the diagonal, as a fraction of the mean of its live entries.

    Returns:
        The factor and what was done. A matrix that is singular within rounding is factored with its eigenvalues
        raised to n * eps * the largest one.

    Raises:
        InputError: H is not square, not finite, not symmetric, or has an eigenvalue further below zero than rounding
            and damping explain; or `damping` is negative.

    >>> result = damped_cholesky(torch.tensor([[4.0, 0.0], [0.0, 0.0]]), damping=0.0)
    >>> result.factor.diagonal(), result.dead
    (tensor([2., 2.]), tensor([False,  True]))
    """
    H = _symmetric(H, "H")
    if not damping >= 0:
        raise InputError(f"damping is {damping}: give a fraction of the mean diagonal, such as 0.01")
    n = H.shape[-1]
    diagonal = H.diagonal(dim1=-2, dim2=-1)
    largest = diagonal.abs().amax(-1, keepdim=True) if n else diagonal.new_zeros(*H.shape[:-2], 1)
    tolerance = _rounding(n, H.dtype) * largest
    if bool((diagonal < -tolerance).any()):
        raise InputError(f"H is not positive semi-definite: a diagonal entry is {float(diagonal.min()):.3g}")
    dead = diagonal <= 0
    n_live = n - dead.sum(-1)
    mean_live = diagonal.masked_fill(dead, 0.0).sum(-1) / n_live.clamp(min=1)
    stand_in = torch.where(n_live > 0, mean_live, 1.0)
    added = damping * mean_live

    matrix = H.masked_fill(dead[..., None] | dead[..., None, :], 0.0) if bool(dead.any()) else H.clone()
    matrix.diagonal(dim1=-2, dim2=-1).add_(torch.where(dead, stand_in[..., None], added[..., None]))
    factor, info = torch.linalg.cholesky_ex(matrix)
    n_clipped = torch.zeros(H.shape[:-2], dtype=torch.int64, device=H.device)
    failed = info != 0
    if bool(failed.any()):
        factor[failed], n_clipped[failed] = _clipped_factor(matrix[failed])
    return CholeskyResult(factor, added, dead, n_clipped, n_live - n_clipped)


def spd_solve(
    A: Float[Tensor, "*batch n n"], B: Float[Tensor, "*batch n k"], damping: float = 0.0
) -> Float[Tensor, "*batch n k"]:
    """The solution X of (A + damping * mean diagonal * I) X = B for symmetric positive semi-definite A.

    Args:
        A: one matrix or a batch.
        B: right-hand sides, as columns.
        damping: see `damped_cholesky`; give some where A may be singular.

    Raises:
        InputError: as for `damped_cholesky`, or B does not fit A.

    >>> spd_solve(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([[2.0], [2.0]]))
    tensor([[1.0000],
            [0.5000]])
    """
    if B.ndim < 2 or B.shape[-2] != A.shape[-1]:
        raise InputError(f"B has shape {tuple(B.shape)} and A {tuple(A.shape)}: B needs as many rows as A")
    result = damped_cholesky(A, damping)
    return result.solve(B.to(result.factor.dtype))


@dataclass(frozen=True)
class Whitening:
    """The linear map that makes a covariance the identity.

    Attributes:
        matrix: W, symmetric, with W C W = I on the directions that vary and 0 on the others.
        inverse: its pseudo-inverse, C^(1/2).
        rank: how many directions vary.
    """

    matrix: Float[Tensor, "*batch n n"]
    inverse: Float[Tensor, "*batch n n"]
    rank: Integer[Tensor, "*batch"]


def whiten(covariance: Float[Tensor, "*batch n n"], rtol: float | None = None) -> Whitening:
    """The symmetric (ZCA) whitening map of a covariance; apply it to centred rows as `rows @ w.matrix`.

    Args:
        covariance: symmetric, positive semi-definite; one or a batch.
        rtol: directions whose variance is below `rtol` times the largest are taken as constant and mapped to 0; None
            for n times the rounding unit.

    Raises:
        InputError: the covariance is not square, finite, symmetric and positive semi-definite.

    >>> whiten(torch.tensor([[4.0, 0.0], [0.0, 0.0]])).matrix
    tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]])
    """
    C = _symmetric(covariance, "covariance")
    values, vectors = torch.linalg.eigh(C.double())
    _check_eigenvalues(values, C.dtype, "covariance")
    top = values.amax(-1, keepdim=True).clamp(min=0.0)
    floor = _rounding(C.shape[-1], C.dtype) if rtol is None else rtol
    live = (values > floor * top) & (values > 0)
    root = torch.where(live, values, 1.0).sqrt()
    matrix = (vectors * torch.where(live, 1 / root, 0.0)[..., None, :]) @ vectors.mT
    inverse = (vectors * torch.where(live, root, 0.0)[..., None, :]) @ vectors.mT
    return Whitening(matrix.to(C.dtype), inverse.to(C.dtype), live.sum(-1))


@dataclass(frozen=True)
class Alignment:
    """The orthogonal map that brings one set of rows closest to another.

    Attributes:
        rotation: orthogonal R.
        scale: the factor s (1 where none was asked for).
        residual: the Frobenius norm of s X R - Y, relative to that of Y.
    """

    rotation: Float[Tensor, "*batch d d"]
    scale: Float[Tensor, "*batch"]
    residual: Float[Tensor, "*batch"]


def procrustes(X: Float[Tensor, "*batch n d"], Y: Float[Tensor, "*batch n d"], *, scale: bool = False) -> Alignment:
    """The orthogonal R (and factor s) that minimise ‖s X R - Y‖, reflections included. Rows are not centred.

    Args:
        X: the rows to move.
        Y: where to, one row for each of X.
        scale: whether to fit a factor too.

    Raises:
        InputError: X and Y differ in shape or are not finite.

    Source:
        Schönemann, A Generalized Solution of the Orthogonal Procrustes Problem (1966).

    >>> X = torch.eye(2)
    >>> procrustes(X, torch.tensor([[0.0, 3.0], [-3.0, 0.0]]), scale=True).scale
    tensor(3.)
    """
    if X.shape != Y.shape or X.ndim < 2:
        raise InputError(f"X has shape {tuple(X.shape)} and Y {tuple(Y.shape)}: give matrices of one shape")
    X, Y = (_finite(_wide(m), name) for m, name in ((X, "X"), (Y, "Y")))
    U, S, Vh = torch.linalg.svd(X.mT @ Y)
    R = U @ Vh
    energy = X.square().sum((-2, -1))
    factor = torch.where(energy > 0, S.sum(-1) / energy, 1.0) if scale else torch.ones_like(energy)
    distance = torch.linalg.matrix_norm(factor[..., None, None] * (X @ R) - Y)
    reach = torch.linalg.matrix_norm(Y)
    return Alignment(R, factor, distance / torch.where(reach > 0, reach, 1.0))


def eigvalsh_batched(
    matrices: Float[Tensor, "*batch m n"],
    *,
    rows: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "*batch n"]:
    """Eigenvalues of symmetric positive semi-definite matrices, falling, with rounding below zero set to zero.

    Args:
        matrices: symmetric n × n matrices; or, with `rows`, data X of m rows whose XᵀX is meant. Where m < n the
            smaller X Xᵀ is taken, which has the same eigenvalues but for zeros.
        rows: whether `matrices` are data rows.
        dtype: to compute in, and of the result.

    Raises:
        InputError: not finite; or, without `rows`, not square, not symmetric, or not positive semi-definite.

    >>> eigvalsh_batched(torch.tensor([[3.0, 4.0]]), rows=True)
    tensor([25.,  0.], dtype=torch.float64)
    """
    if rows:
        if matrices.ndim < 2:
            raise InputError(f"matrices has shape {tuple(matrices.shape)}: give rows of features")
        X = _finite(matrices.to(dtype), "matrices")
        m, n = X.shape[-2:]
        values = torch.linalg.eigvalsh(X @ X.mT if m < n else X.mT @ X).flip(-1).clamp(min=0.0)
        return torch.nn.functional.pad(values, (0, n - values.shape[-1]))
    S = _symmetric(matrices, "matrices")
    values = torch.linalg.eigvalsh(S.to(dtype))
    _check_eigenvalues(values, S.dtype, "matrices")
    return values.flip(-1).clamp(min=0.0)


def _clipped_factor(matrix: Float[Tensor, "k n n"]) -> tuple[Float[Tensor, "k n n"], Integer[Tensor, "k"]]:
    """The Cholesky factors of matrices that are singular within rounding, through their eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix.double())
    _check_eigenvalues(values, matrix.dtype, "H")
    floor = _rounding(matrix.shape[-1], matrix.dtype) * values[..., -1:]
    root = values.clamp(min=floor).sqrt()
    # matrix = (V root)(V root)ᵀ, and the QR of (V root)ᵀ gives its triangular factor without a second chance to fail.
    upper = torch.linalg.qr((vectors * root[..., None, :]).mT, mode="r").R
    signs = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return (upper * signs[..., None]).mT.to(matrix.dtype), (values < floor).sum(-1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _finite(x: Tensor, name: str) -> Tensor:
    # A finite sum has finite terms; only a doubtful one is worth a mask.
    if bool(torch.isfinite(x.sum())):
        return x
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise InputError(
            f"{name} has {bad} entries that are not finite: find where they come from, or leave those rows out"
        )
    return x


def _symmetric(x: Tensor, name: str) -> Tensor:
    """The matrix in float32 or float64, found symmetric; LAPACK then reads its lower triangle only."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise InputError(f"{name} has shape {tuple(x.shape)}: give a square matrix")
    loose = 4 * torch.finfo(x.dtype).eps ** 0.5 if x.dtype.is_floating_point else 0.0
    x = _finite(_wide(x), name)
    if x.numel() and bool(((x - x.mT).abs_().amax((-2, -1)) > loose * x.abs().amax((-2, -1))).any()):
        raise InputError(f"{name} is not symmetric: give XᵀX or a covariance")
    return x


def _rounding(n: int, dtype: torch.dtype) -> float:
    """How large, relative to the largest eigenvalue, the rounding of a computed n × n Gram matrix may be."""
    return max(n, 1) * torch.finfo(dtype).eps


def _check_eigenvalues(values: Tensor, dtype: torch.dtype, name: str) -> None:
    if not values.numel():
        return
    top = values.abs().amax(-1)
    # Sums over many rows round more than one product does; the square root leaves room for that, and still refuses
    # a matrix that is indefinite by construction.
    if bool((values.amin(-1) < -(torch.finfo(dtype).eps ** 0.5) * top).any()):
        raise InputError(
            f"{name} is not positive semi-definite: an eigenvalue is {float(values.min()):.3g} "
            f"where the largest is {float(values.max()):.3g}"
        )
