import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.core.errors import InputError
from assay.core.linalg import damped_cholesky, eigvalsh_batched, procrustes, spd_solve, whiten


def gram(n, rows, seed=0, dtype=torch.float32):
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x.T @ x).to(dtype)


def close(a, b, tol):
    assert (a.double() - b.double()).abs().max() <= tol * b.double().abs().max().clamp(min=1e-300)


def test_cholesky_of_a_good_matrix_is_lapacks():
    H = gram(6, 50)
    r = damped_cholesky(H, 0.0)
    torch.testing.assert_close(r.factor, torch.linalg.cholesky(H))
    assert (r.damping, r.n_clipped, r.rank, r.dead.any()) == (0, 0, 6, False)


def test_damping_is_a_fraction_of_the_mean_live_diagonal():
    H = torch.diag(torch.tensor([1.0, 3.0, 0.0]))
    r = damped_cholesky(H, 0.5)
    assert r.damping == 1.0
    assert r.dead.tolist() == [False, False, True]
    torch.testing.assert_close(r.factor @ r.factor.T, torch.diag(torch.tensor([2.0, 4.0, 2.0])))


@given(st.integers(1, 8), st.integers(0, 8), st.sampled_from([0.0, 1e-6, 0.01]), st.integers(0, 1000), st.booleans())
@settings(max_examples=80, deadline=None)
def test_cholesky_of_any_rank_gives_a_finite_factor(n, rows, damping, seed, single):
    dtype = torch.float32 if single else torch.float64
    H = gram(n, rows, seed, dtype)
    r = damped_cholesky(H, damping)
    assert torch.isfinite(r.factor).all()
    assert torch.equal(r.factor, r.factor.tril())
    assert (r.factor.diagonal() > 0).all()
    expected = H + r.damping * torch.eye(n, dtype=dtype)
    expected.diagonal()[r.dead] = r.factor.diagonal()[r.dead] ** 2
    close(r.factor @ r.factor.T, expected, 20 * n * torch.finfo(dtype).eps)


def test_cholesky_of_rank_one_says_what_it_did():
    v = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    r = damped_cholesky(torch.outer(v, v), 0.0)
    assert r.rank == 3 - r.n_clipped
    assert r.n_clipped >= 1
    close(r.factor @ r.factor.T, torch.outer(v, v), 1e-14)


def test_cholesky_with_a_negative_eigenvalue_of_rounding_size():
    q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    H = (q * torch.tensor([-1e-16, 1e-17, 1.0, 2.0, 3.0], dtype=torch.float64)) @ q.T
    r = damped_cholesky(H, 0.0)
    assert (r.n_clipped, r.rank) == (2, 3)
    close(r.factor @ r.factor.T, (H + H.T) / 2, 1e-14)


def test_cholesky_of_zero():
    r = damped_cholesky(torch.zeros(3, 3))
    assert r.dead.all()
    assert torch.equal(r.factor, torch.eye(3))
    assert r.rank == 0


def test_cholesky_scales():
    H = gram(5, 3)
    a, b = damped_cholesky(H), damped_cholesky(4 * H)
    torch.testing.assert_close(b.factor, 2 * a.factor)


def test_cholesky_in_a_batch_is_one_by_one():
    batch = torch.stack([gram(4, 9), gram(4, 1), torch.zeros(4, 4), torch.diag(torch.tensor([1.0, 0.0, 2.0, 0.0]))])
    batch = batch.reshape(2, 2, 4, 4)
    together = damped_cholesky(batch, 0.0)
    for i in range(2):
        for j in range(2):
            alone = damped_cholesky(batch[i, j], 0.0)
            torch.testing.assert_close(together.factor[i, j], alone.factor)
            assert together.rank[i, j] == alone.rank
            assert torch.equal(together.dead[i, j], alone.dead)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_factored_in_float32(dtype):
    r = damped_cholesky(gram(4, 20).to(dtype))
    assert r.factor.dtype == torch.float32


def test_cholesky_leaves_its_input_and_takes_strides():
    H = gram(5, 9)
    kept = H.clone()
    strided = torch.empty(10, 10)[::2, ::2].copy_(H)
    torch.testing.assert_close(damped_cholesky(strided).factor, damped_cholesky(H).factor)
    assert torch.equal(H, kept)


@given(st.integers(1, 8), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_spd_solve_solves(n, seed):
    A = gram(n, n + 5, seed, torch.float64) + 0.1 * torch.eye(n)
    X = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    close(spd_solve(A, A @ X), X, 1e-9)


def test_spd_solve_gives_dead_inputs_nothing():
    A = torch.diag(torch.tensor([2.0, 0.0]))
    assert spd_solve(A, torch.ones(2, 1)).flatten().tolist() == [0.5, 0.0]


def test_spd_solve_of_a_singular_consistent_system_fits():
    H = gram(5, 2, dtype=torch.float64)
    b = H @ torch.ones(5, 1, dtype=torch.float64)
    close(H @ spd_solve(H, b), b, 1e-10)


@given(st.integers(1, 6), st.integers(1, 10), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_whitening_makes_the_identity_on_what_varies(n, rows, seed):
    C = gram(n, rows, seed, torch.float64)
    w = whiten(C)
    assert w.rank == min(n, rows)
    projector = w.matrix @ w.inverse
    torch.testing.assert_close(w.matrix @ C @ w.matrix, projector, atol=1e-6, rtol=0)
    torch.testing.assert_close(projector @ projector, projector, atol=1e-7, rtol=0)
    assert projector.trace().item() == pytest.approx(min(n, rows), abs=1e-6)


def test_whitening_of_zero_is_zero():
    w = whiten(torch.zeros(2, 3, 3))
    assert w.rank.tolist() == [0, 0]
    assert not w.matrix.any()


@given(st.integers(1, 6), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_procrustes_finds_the_rotation_and_the_scale(d, seed):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(2, 20, d, generator=g, dtype=torch.float64)
    R = torch.linalg.qr(torch.randn(2, d, d, generator=g, dtype=torch.float64)).Q
    a = procrustes(X, 2.5 * X @ R, scale=True)
    close(a.rotation, R, 1e-10)
    torch.testing.assert_close(a.scale, torch.full((2,), 2.5, dtype=torch.float64))
    assert a.residual.max() < 1e-10


def test_procrustes_is_the_best_of_many_rotations():
    g = torch.Generator().manual_seed(0)
    X, Y = torch.randn(2, 10, 3, generator=g)
    best = procrustes(X, Y).residual * Y.norm()
    others = torch.linalg.qr(torch.randn(500, 3, 3, generator=g)).Q
    assert (torch.linalg.matrix_norm(X @ others - Y) >= best - 1e-5).all()


def test_eigenvalues_are_torchs_falling_and_not_negative():
    C = torch.stack([gram(5, 9), gram(5, 2, seed=1)])
    values = eigvalsh_batched(C)
    assert values.dtype == torch.float64
    assert (values >= 0).all()
    assert (values.diff() <= 0).all()
    torch.testing.assert_close(values[0], torch.linalg.eigvalsh(C[0].double()).flip(-1))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_eigenvalues_of_rows_are_squared_singular_values(m, n, seed):
    X = torch.randn(2, m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = eigvalsh_batched(X, rows=True)
    expected = torch.zeros(2, n, dtype=torch.float64)
    expected[:, : min(m, n)] = torch.linalg.svdvals(X).square()
    close(values, expected, 1e-12)
    close(values, eigvalsh_batched(X.mT @ X), 1e-12)


def test_eigenvalues_in_float32():
    assert eigvalsh_batched(gram(3, 5), dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: damped_cholesky(torch.full((2, 2), math.nan)), "H has 4 entries that are not finite"),
        (lambda: damped_cholesky(torch.ones(2, 3)), "H has shape (2, 3)"),
        (lambda: damped_cholesky(torch.tensor([[1.0, 0.5], [0.0, 1.0]])), "H is not symmetric"),
        (lambda: damped_cholesky(torch.diag(torch.tensor([1.0, -1.0]))), "H is not positive semi-definite"),
        (lambda: damped_cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]])), "an eigenvalue is -0.99"),
        (lambda: damped_cholesky(torch.eye(2), -1.0), "damping is -1.0"),
        (lambda: spd_solve(torch.eye(2), torch.ones(3, 1)), "B needs as many rows as A"),
        (lambda: whiten(torch.tensor([[1.0, 2.0], [2.0, 1.0]])), "covariance is not positive semi-definite"),
        (lambda: procrustes(torch.ones(3, 2), torch.ones(2, 2)), "give matrices of one shape"),
        (lambda: procrustes(torch.full((2, 2), math.inf), torch.ones(2, 2)), "X has 4 entries"),
        (lambda: eigvalsh_batched(torch.tensor([[1.0, 2.0], [2.0, 1.0]])), "matrices is not positive semi-definite"),
        (lambda: eigvalsh_batched(torch.ones(3), rows=True), "give rows of features"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
