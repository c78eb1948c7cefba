"""Linear item-to-item recommenders in closed form: DEQL, EDLAE and EASE.

All three give a matrix W (items x items) of one shape. With C = RᵀR, c its diagonal and

    P = (C + s·diag(c) + r·I)⁻¹,

column i of W is `gamma_i · P[:, i] + delta_i · e_i`, where the two numbers depend on c_i and P_ii alone. For DEQL that
follows from its normal equations: outside row i, the system of column i is that of every other column, so that its
solution is a combination of P e_i and P C e_i, and P C e_i is itself a combination of P e_i and e_i. One factorisation
and the diagonal of P are therefore all that a fit needs, and P may be applied from the users' side (Woodbury's
identity on R) where there are fewer users than items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from numbers import Real
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy.linalg import cho_solve, get_lapack_funcs, solve_triangular
from scipy.sparse import csc_matrix, csr_matrix, issparse, sparray, spmatrix
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin, clone
from sklearn.model_selection import ParameterGrid
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from assay.core.errors import InputError

# Working memory of one block of rows or columns, in numbers: 32 MB in float64.
_BLOCK = 1 << 22

Interactions: TypeAlias = ArrayLike | spmatrix | sparray


def _blocks(total: int, width: int) -> Iterator[slice]:
    """Cut `total` rows of `width` numbers each into blocks of bounded size."""
    step = max(1, _BLOCK // max(width, 1))
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def _row_products(A: csr_matrix) -> np.ndarray:
    """A Aᵀ, dense, never holding more than a block of it as a sparse product."""
    out = np.empty((A.shape[0], A.shape[0]), dtype=A.dtype)
    transposed = A.T.tocsr()
    for rows in _blocks(*out.shape):
        out[rows] = (A[rows] @ transposed).toarray()
    return out


def _cholesky_in_place(A: np.ndarray) -> np.ndarray:
    """The lower factor of a symmetric matrix in the same memory; the triangle above it is left undefined."""
    lange, potrf, pocon = get_lapack_funcs(("lange", "potrf", "pocon"), (A,))
    size = lange("1", A.T)
    factor, failed = potrf(A.T, lower=True, overwrite_a=True, clean=False)
    if failed or pocon(factor, size, uplo="L")[0] < np.finfo(A.dtype).eps:
        raise InputError(f"R is numerically singular in {A.dtype} at this setting: raise l2 (or p)")
    return cast(np.ndarray, factor)


class _ItemSide:
    """P held as a dense matrix: the memory of the Gram matrix, which it overwrites."""

    def __init__(self, gram: np.ndarray, ridge: np.ndarray) -> None:
        gram[np.diag_indices_from(gram)] += ridge
        factor = _cholesky_in_place(gram)
        # P itself is what W consists of, so there is no right-hand side to solve for instead; potri works in place.
        (potri,) = get_lapack_funcs(("potri",), (factor,))
        filled, _ = potri(factor, lower=True, overwrite_c=True)
        # Row-major, which holds the result in its upper triangle.
        self.P = filled.T
        for rows in _blocks(*self.P.shape):
            self.P[rows.stop :, rows] = self.P[rows, rows.stop :].T
            corner = self.P[rows, rows]
            corner[...] = np.triu(corner) + np.triu(corner, 1).T
        self.diagonal = self.P.diagonal().copy()

    def apply(self, X: csr_matrix) -> np.ndarray:
        """X P for a block of rows."""
        return cast(np.ndarray, X @ self.P)


class _UserSide:
    """P = S - S Rᵀ (I + R S Rᵀ)⁻¹ R S with S = 1/ridge, applied from the factor of a users x users matrix."""

    def __init__(self, R: csr_matrix, ridge: np.ndarray) -> None:
        self.R = R
        self.inverse_ridge = 1 / ridge
        kernel = _row_products(R.multiply(np.sqrt(self.inverse_ridge)).tocsr())
        kernel[np.diag_indices_from(kernel)] += 1
        self.factor = _cholesky_in_place(kernel)
        columns = csc_matrix(R)
        leverage = np.empty_like(ridge)
        for items in _blocks(R.shape[1], R.shape[0]):
            half = solve_triangular(
                self.factor, columns[:, items].toarray(order="F"), lower=True, overwrite_b=True, check_finite=False
            )
            leverage[items] = np.einsum("ui,ui->i", half, half)
        self.diagonal = self.inverse_ridge * (1 - self.inverse_ridge * leverage)

    def apply(self, X: csr_matrix) -> np.ndarray:
        """X P for a block of rows."""
        scaled = X.multiply(self.inverse_ridge).tocsr()
        shared = cho_solve((self.factor, True), (self.R @ scaled.T).toarray(), overwrite_b=True, check_finite=False)
        out = np.ascontiguousarray((self.R.T @ np.ascontiguousarray(shared)).T)
        out *= -self.inverse_ridge
        own = scaled.tocoo()
        out[own.row, own.col] += own.data
        return out


class _Ridge(NamedTuple):
    """What P adds to the diagonal of C: `scale` times that diagonal, and a constant."""

    scale: float
    constant: float


class _Gram:
    """The interactions, and what all settings on them share."""

    def __init__(self, R: csr_matrix, solver: str, keep: bool) -> None:
        n_users, n_items = R.shape
        self.R = R
        self.energy = np.asarray(R.multiply(R).sum(axis=0), dtype=R.dtype).ravel()
        # Multiplications: n³ for the inverse of the Gram matrix; m²n + m³/3 for the users' factor and the diagonal.
        cheaper = "users" if n_users**2 * (n_items + n_users / 3) < n_items**3 else "items"
        self.solver = cheaper if solver == "auto" else solver
        self.keep = keep
        self.kept: np.ndarray | None = None

    def invert(self, ridge: _Ridge) -> _ItemSide | _UserSide:
        """P for one ridge."""
        added = (ridge.scale * self.energy + ridge.constant).astype(self.R.dtype)
        if (empty := np.flatnonzero(added <= 0)).size:
            shown = ", ".join(map(str, empty[:10])) + (", …" if empty.size > 10 else "")
            raise InputError(f"item columns [{shown}] of R are empty: drop them or set l2 > 0")
        inverse: _ItemSide | _UserSide
        if self.solver == "users":
            inverse = _UserSide(self.R, added)
        else:
            gram = self.kept if self.kept is not None else _row_products(self.R.T.tocsr())
            if self.keep:
                self.kept, gram = gram, gram.copy()
            inverse = _ItemSide(gram, added)
        if not (inverse.diagonal > 0).all():
            raise InputError(f"R is numerically singular in {added.dtype} at this setting: raise l2 (or p)")
        return inverse


def _require(holds: bool, name: str, value: Any, wanted: str) -> None:
    if not holds:
        raise InputError(f"{name}={value!r}: it must be {wanted}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and bool(np.isfinite(float(value)))


def _is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    # An array compares with each of its entries, and `in` would then have no truth value to go by.
    return not isinstance(value, np.ndarray) and value in choices


class _LinearItemModel(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """What the three estimators share: everything but their parameters and the two numbers per column."""

    l2: float
    solver: str
    dtype: Any

    def _check_parameters(self) -> None:
        _require(_is_number(self.l2) and self.l2 >= 0, "l2", self.l2, "a number of at least 0")
        solvers = ("auto", "items", "users")
        _require(_is_one_of(self.solver, solvers), "solver", self.solver, "one of " + ", ".join(map(repr, solvers)))
        dtypes = ("float32", "float64", np.float32, np.float64)
        _require(_is_one_of(self.dtype, dtypes), "dtype", self.dtype, "float32 or float64")

    def _ridge(self) -> _Ridge:
        raise NotImplementedError

    def _columns(self, energy: np.ndarray, diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`gamma` and `delta` of every column, from the diagonals of C and P."""
        raise NotImplementedError

    @property
    def _hollow(self) -> bool:
        """Whether W has a zero diagonal by construction."""
        return True

    def _rows(self, X: Any, reset: bool = False) -> csr_matrix:
        X = validate_data(self, X, reset=reset, accept_sparse="csr", dtype=[np.float64, np.float32])
        X = csr_matrix(X, dtype=np.dtype(self.dtype), copy=True)
        X.sum_duplicates()
        X.eliminate_zeros()
        return X

    def fit(self, R: Interactions, y: object = None) -> Self:
        """Solve for the item weights.

        Args:
            R: interactions, users x items, sparse or dense; 0/1 or any real weights.
            y: ignored.

        Returns:
            The fitted estimator.

        Raises:
            InputError: a parameter is out of range, or R has empty item columns while l2 = 0.
        """
        self._check_parameters()
        gram = _Gram(self._rows(R, reset=True), self.solver, keep=False)
        return self._adopt(gram, gram.invert(self._ridge()))

    def _adopt(self, gram: _Gram, inverse: _ItemSide | _UserSide) -> Self:
        self.__dict__.pop("item_weights_", None)
        self._inverse = inverse
        self._gamma, self._delta = self._columns(gram.energy, inverse.diagonal)
        self.solver_ = gram.solver
        return self

    def _score_block(self, X: csr_matrix) -> np.ndarray:
        out = self._inverse.apply(X)
        out *= self._gamma
        own = X.tocoo()
        out[own.row, own.col] += own.data * self._delta[own.col]
        return out

    def _scores(self, X: csr_matrix) -> np.ndarray:
        out = np.empty(X.shape, dtype=X.dtype)
        for rows in _blocks(*X.shape):
            out[rows] = self._score_block(X[rows])
        return out

    @cached_property
    def item_weights_(self) -> Float[np.ndarray, "items items"]:
        """W, dense: entry (j, i) is what an interaction with item j adds to the score of item i.

        Built when first asked for, and kept; scoring does not need it.
        """
        check_is_fitted(self)
        n_items = self.n_features_in_
        identity = csr_matrix(
            (np.ones(n_items), np.arange(n_items), np.arange(n_items + 1)), dtype=np.dtype(self.dtype)
        )
        weights = self._scores(identity)
        if self._hollow:
            np.fill_diagonal(weights, 0)
        return weights

    def score_items(self, R_rows: Interactions) -> Float[np.ndarray, "users items"]:
        """Score every item for every user: `R_rows @ W`.

        Args:
            R_rows: interactions of any users, users x items, sparse or dense.

        Returns:
            Scores, users x items, higher is better. The user's own items are scored too.
        """
        check_is_fitted(self)
        return self._scores(self._rows(R_rows))

    def transform(self, R: Interactions) -> Float[np.ndarray, "users items"]:
        """The same as `score_items`, under the name that a scikit-learn pipeline calls."""
        return self.score_items(R)

    def recommend(
        self, R_rows: Interactions, k: int = 20, exclude_seen: bool = True
    ) -> tuple[Int[np.ndarray, "users k"], Float[np.ndarray, "users k"]]:
        """The k best items of every user, in bounded memory.

        Args:
            R_rows: interactions of any users, users x items, sparse or dense.
            k: items a user, at most the number of items.
            exclude_seen: leave out the items that the user has interacted with.

        Returns:
            Item ids, best first, and their scores; equal scores stand in the order of their ids. A user with fewer
            than k items left gets the id -1 and the score -inf in the places that remain.

        Raises:
            InputError: k is not between 1 and the number of items.
        """
        check_is_fitted(self)
        X = self._rows(R_rows)
        n_users, n_items = X.shape
        _require(isinstance(k, int | np.integer) and 1 <= k <= n_items, "k", k, f"a whole number from 1 to {n_items}")
        ids = np.empty((n_users, k), dtype=np.int64)
        scores = np.empty((n_users, k), dtype=X.dtype)
        for rows in _blocks(n_users, n_items):
            block = self._score_block(X[rows])
            if exclude_seen:
                seen = X[rows].tocoo()
                block[seen.row, seen.col] = -np.inf
            ids[rows], scores[rows] = _top(block, k)
        ids[np.isneginf(scores)] = -1
        return ids, scores

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = [self.dtype]
        return tags


def _top(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k highest of each row, best first, ties by column."""
    last = -np.partition(-scores, k - 1, axis=1)[:, k - 1 : k]
    above, level = scores > last, scores == last
    room = k - above.sum(axis=1, keepdims=True)
    ids = np.nonzero(above | (level & (np.cumsum(level, axis=1) <= room)))[1].reshape(-1, k)
    values = np.take_along_axis(scores, ids, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)


class DEQL(_LinearItemModel):
    """A linear recommender that minimises its expected error under dropout, with dropped entries weighted apart.

    Each entry of R is dropped from the input with probability p; the squared error on an entry weighs a² where that
    entry was dropped and b² where it was kept. The expectation over all masks is minimised exactly, without sampling.

    P depends on the parameters only through p and l2 / ((1-p)²·(p·a² + (1-p)·b²)), and W beyond P only through
    b² / (p·a² + (1-p)·b²). Two consequences: settings that share the first pair cost one factorisation
    (`deql_grid` does that), and with `zero_diag=True` a and b do nothing but rescale l2, which makes it EDLAE.

    Args:
        a: emphasis on dropped entries, > 0. Only b/a matters, up to the scale of l2.
        b: emphasis on kept entries, >= 0. It may exceed a. b = 0 needs l2 > 0 or `zero_diag`.
        p: probability of dropping an entry, between 0 and 1, both excluded.
        l2: ridge on W, >= 0; good values grow with the number of users.
        zero_diag: fix the diagonal of W to zero.
        solver: "items" factorises items x items, "users" users x users and never builds W unless asked;
            "auto" takes the cheaper one. The results agree to rounding.
        dtype: of all computation, "float64" or "float32". "float32" halves the memory and loses about half the digits.

    Attributes:
        item_weights_: W, items x items; entry (j, i) is what item j adds to the score of item i. Built when first
            asked for.
        solver_: the side that was used.
        n_features_in_: number of items.

    Memory: "items" holds one items x items matrix; "users" one users x users matrix and R. Scoring adds its output
    and blocks of 32 MB.

    Source: Generalizing Linear Autoencoder Recommenders with Decoupled Expected Quadratic Loss, arXiv 2603.07402.
    The closed form used here is derived from the paper's normal equations and needs fewer products than the paper's
    rank-one updates.

    Example:
        >>> import numpy as np
        >>> from scipy.sparse import csr_matrix
        >>> R = csr_matrix(np.array([[1., 1., 0.], [1., 1., 0.], [0., 1., 1.], [1., 0., 1.]]))
        >>> model = DEQL(b=0.5, p=0.5, l2=1.0).fit(R)
        >>> ids, scores = model.recommend(csr_matrix([[1., 0., 0.]]), k=2)
        >>> ids.tolist()
        [[1, 2]]
    """

    def __init__(
        self,
        a: float = 1.0,
        b: float = 0.5,
        p: float = 0.5,
        l2: float = 100.0,
        zero_diag: bool = False,
        solver: Literal["auto", "items", "users"] = "auto",
        dtype: Any = "float64",
    ) -> None:
        self.a = a
        self.b = b
        self.p = p
        self.l2 = l2
        self.zero_diag = zero_diag
        self.solver = solver
        self.dtype = dtype

    def _check_parameters(self) -> None:
        super()._check_parameters()
        _require(_is_number(self.a) and self.a > 0, "a", self.a, "a number above 0")
        _require(_is_number(self.b) and self.b >= 0, "b", self.b, "a number of at least 0")
        _require(_is_number(self.p) and 0 < self.p < 1, "p", self.p, "between 0 and 1, both excluded")
        _require(isinstance(self.zero_diag, bool | np.bool_), "zero_diag", self.zero_diag, "True or False")
        if self.b == 0 and self.l2 == 0 and not self.zero_diag:
            raise InputError("b=0 with l2=0 leaves the diagonal of W undetermined: set zero_diag=True, or l2 > 0")

    def _emphasis(self) -> float:
        return self.p * self.a**2 + (1 - self.p) * self.b**2

    def _ridge(self) -> _Ridge:
        q = 1 - self.p
        return _Ridge(self.p / q, self.l2 / (q * q * self._emphasis()))

    @property
    def _hollow(self) -> bool:
        return self.zero_diag

    def _columns(self, energy: np.ndarray, diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = 1 - self.p
        if self.zero_diag:
            return -1 / (q * diagonal), np.full_like(diagonal, 1 / q)
        # Two equations in (delta, gamma): rows j ≠ i of H_i w_i = v_i give the first, row i the second.
        #   rho·delta + (rho-1)·P_ii·gamma                        = 1/q
        #   (rho·c_i/q + r)·delta + (rho - r·(rho-1)·P_ii)·gamma  = rho·c_i/q
        rho = self.b**2 / self._emphasis()
        r = self._ridge().constant
        load = rho * energy / q
        excess = (rho - 1) * diagonal
        determinant = rho * (rho - r * excess) - excess * (load + r)
        gamma = (rho * load - (load + r) / q) / determinant
        delta = ((rho - r * excess) / q - excess * load) / determinant
        return gamma, delta


class EDLAE(_LinearItemModel):
    """The denoising linear autoencoder with emphasis on dropped entries only, and a zero diagonal.

    W has -P_ji / P_ii off the diagonal, with P = (C + p/(1-p)·diag(C) + l2·I)⁻¹. It is DEQL with b = 0 and
    `zero_diag=True` up to the constant factor 1/(1-p), with DEQL's l2 = (1-p)²·p·a² times the one here.

    Args:
        p: probability of dropping an entry, from 0 up to 1 excluded; 0 is EASE and needs l2 > 0.
        l2: ridge, >= 0, on the scale of C.
        solver: as in `DEQL`.
        dtype: as in `DEQL`.

    Attributes:
        item_weights_: W, items x items, as in `DEQL`.
        solver_: the side that was used.

    Source: Autoencoders that don't overfit towards the Identity, Steck, NeurIPS 2020.

    Example:
        >>> import numpy as np
        >>> EDLAE(p=0.5, l2=0.0).fit(np.array([[1., 1.], [1., 0.], [1., 1.], [0., 1.]])).item_weights_.round(4)
        array([[0.    , 0.3333],
               [0.3333, 0.    ]])
    """

    def __init__(
        self,
        p: float = 0.33,
        l2: float = 100.0,
        solver: Literal["auto", "items", "users"] = "auto",
        dtype: Any = "float64",
    ) -> None:
        self.p = p
        self.l2 = l2
        self.solver = solver
        self.dtype = dtype

    def _check_parameters(self) -> None:
        super()._check_parameters()
        _require(_is_number(self.p) and 0 <= self.p < 1, "p", self.p, "at least 0 and below 1")
        if self.p == 0 and self.l2 == 0:
            raise InputError("p=0 with l2=0 leaves W unregularised: set p > 0 or l2 > 0")

    def _ridge(self) -> _Ridge:
        return _Ridge(self.p / (1 - self.p), float(self.l2))

    def _columns(self, energy: np.ndarray, diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return -1 / diagonal, np.ones_like(diagonal)


class EASE(_LinearItemModel):
    """The shallow linear autoencoder with a ridge and a zero diagonal: the classical baseline.

    W has -P_ji / P_ii off the diagonal, with P = (C + l2·I)⁻¹.

    Args:
        l2: ridge, > 0, on the scale of C.
        solver: as in `DEQL`.
        dtype: as in `DEQL`.

    Attributes:
        item_weights_: W, items x items, as in `DEQL`.
        solver_: the side that was used.

    Source: Embarrassingly Shallow Autoencoders for Sparse Data, arXiv 1905.03375, equation 8.

    Example:
        >>> import numpy as np
        >>> EASE(l2=1.0).fit(np.array([[1., 1.], [1., 0.], [1., 0.], [0., 1.]])).item_weights_.round(4)
        array([[0.    , 0.25  ],
               [0.3333, 0.    ]])
    """

    def __init__(
        self, l2: float = 100.0, solver: Literal["auto", "items", "users"] = "auto", dtype: Any = "float64"
    ) -> None:
        self.l2 = l2
        self.solver = solver
        self.dtype = dtype

    def _check_parameters(self) -> None:
        super()._check_parameters()
        _require(self.l2 > 0, "l2", self.l2, "above 0")

    def _ridge(self) -> _Ridge:
        return _Ridge(0.0, float(self.l2))

    def _columns(self, energy: np.ndarray, diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return -1 / diagonal, np.ones_like(diagonal)


def deql_grid(
    R: Interactions,
    grid: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]],
    evaluate: Callable[[Any], float | Mapping[str, float]],
    *,
    estimator: DEQL | EDLAE | EASE | None = None,
) -> list[dict[str, Any]]:
    """Fit and evaluate a grid of settings on the same interactions, sharing what they share.

    The Gram matrix is formed once, and settings with the same P (see `DEQL`) share its factorisation: for each p, all
    b at `l2 = r * (1-p)**2 * (p*a**2 + (1-p)*b**2)` cost one factorisation for each r; so do all b at l2 = 0.
    Values of l2 that agree to twelve digits on that scale count as the same. Evaluation runs group by group, with one
    factorisation in memory.

    Args:
        R: interactions, users x items, sparse or dense.
        grid: either a mapping from parameter name to values, all combinations of which are tried, or the points
            themselves, each a mapping from parameter name to value.
        evaluate: called with each fitted estimator; returns one number or several named ones. The estimator is
            only good during the call if its memory matters: keep numbers, not estimators.
        estimator: gives the class and the parameters that the grid leaves out; `DEQL()` by default. `solver` and
            `dtype` are taken from it.

    Returns:
        One mapping a point in the order of the grid: its parameters, and what `evaluate` returned (under "value" if it
        was a number). `pandas.DataFrame(...)` takes it as it is.

    Raises:
        InputError: the grid is empty or sets `solver` or `dtype`, or a point is out of range.

    Example:
        >>> import numpy as np
        >>> R = np.array([[1., 1., 0.], [1., 1., 0.], [0., 1., 1.], [1., 0., 1.]])
        >>> rows = deql_grid(R, {"b": [0.5, 1.0], "l2": [1.0]}, lambda model: model.score_items(R)[0, 2])
        >>> [(row["b"], round(row["value"], 4)) for row in rows]
        [(0.5, 0.2674), (1.0, 0.2553)]
    """
    estimator = DEQL() if estimator is None else estimator
    points = [dict(p) for p in (ParameterGrid(_listed(grid)) if isinstance(grid, Mapping) else grid)]
    if not points:
        raise InputError("grid is empty: give at least one setting")
    if fixed := sorted({"solver", "dtype"} & {name for point in points for name in point}):
        raise InputError(f"grid sets {fixed[0]!r}: set it on the estimator, where all settings share it")
    models = [clone(estimator).set_params(**point) for point in points]
    for model in models:
        model._check_parameters()
    groups: dict[tuple[str, str], list[int]] = {}
    for position, model in enumerate(models):
        ridge = model._ridge()
        groups.setdefault((f"{ridge.scale:.12g}", f"{ridge.constant:.12g}"), []).append(position)

    rows = models[0]._rows(R, reset=True)
    gram = _Gram(rows, estimator.solver, keep=True)
    results: list[dict[str, Any]] = [{} for _ in points]
    for members in groups.values():
        inverse = gram.invert(models[members[0]]._ridge())
        for position in members:
            model = clone(models[position])
            model.n_features_in_ = rows.shape[1]
            found = evaluate(model._adopt(gram, inverse))
            named = found if isinstance(found, Mapping) else {"value": found}
            results[position] = points[position] | {name: float(value) for name, value in named.items()}
    return results


def _listed(grid: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in grid.items()}


def _hits(held_out: Interactions, ranked: Int[np.ndarray, "users n_ranked"], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether each of the first k recommendations was held out, and how many items were held out."""
    held = csr_matrix(held_out, copy=issparse(held_out))
    held.sum_duplicates()
    held.eliminate_zeros()
    ranked = np.asarray(ranked)
    if ranked.ndim != 2 or not np.issubdtype(ranked.dtype, np.integer):
        raise InputError("ranked must be item ids, users x ranks, as `recommend` returns them first")
    if ranked.shape[0] != held.shape[0]:
        raise InputError(f"held_out has {held.shape[0]} users and ranked has {ranked.shape[0]}: give the same users")
    if not 1 <= k <= ranked.shape[1]:
        raise InputError(f"k={k}: ranked holds {ranked.shape[1]} items a user; recommend at least k")
    top = ranked[:, :k]
    if top.size and not -1 <= top.min() <= top.max() < held.shape[1]:
        raise InputError(f"ranked has item ids outside -1 … {held.shape[1] - 1}: held_out has fewer items")
    users = np.broadcast_to(np.arange(len(top))[:, None], top.shape)
    found = np.asarray(held[users.ravel(), np.maximum(top, 0).ravel()] != 0).reshape(top.shape)
    return found & (top >= 0), np.diff(held.indptr)


def recall_at_k(
    held_out: Interactions, ranked: Int[np.ndarray, "users n_ranked"], k: int, *, capped: bool = True
) -> Float[np.ndarray, "users"]:
    """Recall of each user's first k recommendations.

    Args:
        held_out: the items to be found, users x items; any non-zero entry counts.
        ranked: item ids, best first, users x at least k; -1 is no recommendation.
        k: how many recommendations count.
        capped: divide by min(k, items held out), as is usual for strong generalisation, so that 1 is always
            attainable; False divides by the items held out.

    Returns:
        One number a user, 0 to 1; NaN for a user with nothing held out.

    Raises:
        InputError: the shapes disagree, or `ranked` has fewer than k columns.

    Example:
        >>> import numpy as np
        >>> recall_at_k(np.array([[0, 1, 1]]), np.array([[1, 0, 2]]), k=2)
        array([0.5])
    """
    found, total = _hits(held_out, ranked, k)
    return _ratio(found.sum(axis=1), np.minimum(total, k) if capped else total)


def ndcg_at_k(held_out: Interactions, ranked: Int[np.ndarray, "users n_ranked"], k: int) -> Float[np.ndarray, "users"]:
    """Normalised discounted cumulative gain of each user's first k recommendations, with binary relevance.

    Args:
        held_out: the items to be found, users x items; any non-zero entry counts.
        ranked: item ids, best first, users x at least k; -1 is no recommendation.
        k: how many recommendations count; the ideal list is cut at min(k, items held out).

    Returns:
        One number a user, 0 to 1; NaN for a user with nothing held out.

    Raises:
        InputError: the shapes disagree, or `ranked` has fewer than k columns.

    Example:
        >>> import numpy as np
        >>> ndcg_at_k(np.array([[0, 1, 0]]), np.array([[2, 1, 0]]), k=2).round(4)
        array([0.6309])
    """
    found, total = _hits(held_out, ranked, k)
    discount = 1 / np.log2(np.arange(2, k + 2))
    ideal = np.concatenate([[0.0], np.cumsum(discount)])
    return _ratio(found @ discount, ideal[np.minimum(total, k)])


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    ratio = np.full(len(part), np.nan)
    np.divide(part, whole, out=ratio, where=whole > 0)
    return ratio
