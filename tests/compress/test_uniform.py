"""Grids hold what they say, the clip search and the sweeps never cost more, and no Hessian makes LAPACK raise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.compress import Curvature, UniformGrid, gptq, output_error, refine, uniform_grid
from assay.compress._uniform import rtn, sweep
from assay.core.errors import InputError


def draw(seed, out=12, n_in=24, rows=96, rank=6, noise=0.3, dtype=torch.float32):
    """A weight and the second moments of correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, rank, generator=g) @ torch.randn(rank, n_in, generator=g) / rank**0.5
    x += noise * torch.randn(rows, n_in, generator=g)
    w = torch.randn(out, n_in, generator=g) / n_in**0.5
    return w.to(dtype), (x.T @ x / rows).to(dtype)


def quadratic(delta, H):
    return ((delta.double() @ H.double()) * delta.double()).sum(1)


# ---- grids -------------------------------------------------------------------------------------------------------


def test_the_full_range_is_the_largest_magnitude_over_the_highest_code():
    grid = uniform_grid(torch.tensor([[-7.0, 4.9, 3.2], [0.7, 0.0, -0.1]]), clip_search=False)
    assert torch.allclose(grid.scale, torch.tensor([[1.0], [0.1]]))
    assert (grid.low, grid.high, grid.zero) == (-8, 7, None)
    assert grid.codes(torch.tensor([[-9.0, 4.9, 3.2], [0.7, 0.0, -0.1]])).tolist() == [[-8, 5, 3], [7, 0, -1]]


def test_a_tie_goes_to_the_even_code():
    grid = UniformGrid(torch.ones(1, 1), None, 4, 4)
    assert grid.codes(torch.tensor([[0.5, 1.5, 2.5, -0.5]])).tolist() == [[0, 2, 2, 0]]


def test_the_least_scale_of_a_row_of_zeros():
    grid = uniform_grid(torch.zeros(2, 5))
    assert torch.allclose(grid.scale, torch.full((2, 1), 1e-5 / 7))
    assert torch.equal(grid.nearest(torch.zeros(2, 5)), torch.zeros(2, 5))


def test_an_asymmetric_grid_spans_the_range_and_has_an_exact_zero():
    w = torch.tensor([[0.0, 1.0, 2.0, 15.0]])
    grid = uniform_grid(w, symmetric=False, clip_search=False)
    assert torch.allclose(grid.scale, torch.ones(1, 1))
    assert grid.zero.tolist() == [[-8.0]]
    assert grid.nearest(w).tolist() == w.tolist()


def test_the_clip_search_tries_eighty_ranges_from_all_to_a_fifth():
    from assay.compress._uniform import _CLIPS

    assert len(_CLIPS) == 80
    assert (max(_CLIPS), min(_CLIPS)) == (1.0, 0.21)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_clip_search_finds_the_best_of_its_ranges(bits, symmetric):
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(bits))
    w[:, 0] *= 6
    found = uniform_grid(w, bits=bits, symmetric=symmetric)
    full = uniform_grid(w, bits=bits, symmetric=symmetric, clip_search=False)

    def cost(grid):
        return (grid.nearest(w) - w).abs().pow(2.4).sum(1)

    assert (cost(found) <= cost(full)).all()
    if bits < 8:
        assert (cost(found) < 0.9 * cost(full)).any()


def test_importance_moves_the_range_to_the_columns_that_matter():
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    w[:, 0] = 20.0
    heavy = torch.ones(64)
    heavy[0] = 0.0
    plain, weighted = uniform_grid(w), uniform_grid(w, importance=heavy)
    error = [((g.nearest(w) - w)[:, 1:]).square().sum() for g in (plain, weighted)]
    assert error[1] < error[0]


@pytest.mark.parametrize("n_in", [1, 7, 8, 20])
def test_groups_are_grids_of_their_own_and_the_last_may_be_shorter(n_in):
    w = torch.randn(5, n_in, generator=torch.Generator().manual_seed(n_in))
    grid = uniform_grid(w, group_size=8)
    assert grid.scale.shape == (5, math.ceil(n_in / 8))
    for g in range(grid.scale.shape[1]):
        at = slice(8 * g, 8 * g + 8)
        alone = uniform_grid(w[:, at])
        assert torch.equal(alone.scale, grid.scale[:, g : g + 1])
        assert torch.equal(alone.nearest(w[:, at]), grid.nearest(w)[:, at])
        assert torch.equal(grid.nearest(w[:, at], 8 * g), grid.nearest(w)[:, at])


def test_one_column_at_a_time_is_the_same_as_all():
    w = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    for symmetric in (True, False):
        grid = uniform_grid(w, group_size=8, symmetric=symmetric)
        columns = torch.cat([grid.nearest(w[:, i : i + 1], i) for i in range(20)], 1)
        assert torch.equal(columns, grid.nearest(w))
        assert torch.equal(grid.values(grid.codes(w)), grid.nearest(w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_grid_is_that_of_the_rounded_scales(dtype):
    w = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
    grid = uniform_grid(w, scale_dtype=dtype)
    assert torch.equal(grid.scale, grid.scale.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_dtype_and_layout(dtype):
    w = torch.randn(24, 6, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert torch.equal(uniform_grid(w.T).scale, uniform_grid(w.T.contiguous()).scale)
    assert torch.equal(uniform_grid(w).scale, uniform_grid(w.float()).scale)
    assert rtn(w, uniform_grid(w)).dtype == torch.int8


def test_rounding_to_a_grid_twice_changes_nothing():
    w = torch.randn(8, 40, generator=torch.Generator().manual_seed(4))
    for symmetric in (True, False):
        grid = uniform_grid(w, bits=3, group_size=16, symmetric=symmetric)
        assert torch.equal(grid.nearest(grid.nearest(w)), grid.nearest(w))


@pytest.mark.parametrize("bits", [1, 9])
def test_bits_out_of_range(bits):
    with pytest.raises(InputError, match=f"bits is {bits}: a uniform grid takes 2 to 8"):
        uniform_grid(torch.ones(2, 2), bits=bits)


def test_a_group_size_out_of_range():
    with pytest.raises(InputError, match="group_size is 0: give at least 1"):
        uniform_grid(torch.ones(2, 2), group_size=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite(bad):
    with pytest.raises(InputError, match="1 entries that are not finite"):
        uniform_grid(torch.tensor([[1.0, bad]]))


# ---- curvature ---------------------------------------------------------------------------------------------------


def test_the_factor_is_that_of_the_inverse():
    _, H = draw(0)
    c = Curvature.of(H)
    assert torch.allclose(c.U, c.U.triu())
    assert torch.allclose(c.U.T @ c.U @ c.H, torch.eye(24, dtype=torch.float64), atol=1e-9)
    damped = H.double() + 0.01 * H.double().diagonal().mean() * torch.eye(24)
    assert torch.allclose(c.H, damped, atol=1e-9)


def test_the_worked_inverse():
    H = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    U = Curvature.of(H, damping=0.0).U
    # H⁻¹ = [[3, −2, 1], [−2, 4, −2], [1, −2, 3]] / 4
    assert torch.allclose(U.T @ U, torch.tensor([[3.0, -2, 1], [-2, 4, -2], [1, -2, 3]]).double() / 4)
    assert math.isclose(float(U[0, 0]) ** 2, 0.75)


def singular(kind, n=16):
    if kind == "zero":
        return torch.zeros(n, n)
    if kind == "rank one":
        v = torch.randn(n, 1, generator=torch.Generator().manual_seed(0))
        return v @ v.T
    if kind == "dead inputs":
        H = draw(0, n_in=n)[1]
        H[:3], H[:, :3] = 0, 0
        return H
    return 1e-30 * draw(0, n_in=n)[1]


@pytest.mark.parametrize("damping", [0.0, 1e-7, 0.01])
@pytest.mark.parametrize("kind", ["zero", "rank one", "dead inputs", "tiny"])
def test_no_singular_hessian_raises(kind, damping):
    H = singular(kind)
    w = draw(1, n_in=16)[0]
    grid = uniform_grid(w)
    values = gptq(w, H, grid, damping=damping, rounds=2)
    assert torch.isfinite(values).all()
    assert torch.equal(grid.nearest(values), values)


@pytest.mark.parametrize("damping", [0.0, 1e-8])
def test_what_is_indefinite_by_the_rounding_of_float32_alone(damping):
    x = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    H = x.T @ x
    assert torch.linalg.eigvalsh(H.double())[0] < 0
    c = Curvature.of(H, damping)
    assert int(c.report.n_clipped) > 0
    assert torch.allclose(c.H, H.double(), atol=1e-3)
    assert torch.allclose(c.U.T @ c.U @ c.H, torch.eye(32, dtype=torch.float64), atol=1e-2)


def test_what_is_asymmetric_by_the_rounding_of_float32_alone():
    H = draw(0)[1]
    H = (H + H.T) / 2
    spoilt = H.clone()
    spoilt[3, 7] *= 1 + 1e-5
    c = Curvature.of(spoilt)
    assert torch.allclose(c.H, Curvature.of(H).H, atol=1e-5)
    with pytest.raises(InputError, match="not symmetric"):
        Curvature.of(spoilt.double())


def test_dead_inputs_are_cut_off_and_reported():
    c = Curvature.of(singular("dead inputs"))
    assert c.dead.tolist() == [True] * 3 + [False] * 13
    assert (c.H[:3, 3:] == 0).all()
    assert (c.U[:3, 3:] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hessian_that_is_not_finite(bad):
    H = torch.eye(3)
    H[1, 2] = H[2, 1] = bad
    with pytest.raises(InputError, match="not finite"):
        Curvature.of(H)


def test_a_hessian_that_is_none():
    with pytest.raises(InputError, match="not symmetric"):
        Curvature.of(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    with pytest.raises(InputError, match="positive semi-definite"):
        Curvature.of(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    with pytest.raises(InputError, match="the weight has shape"):
        gptq(torch.ones(2, 3), torch.eye(2), uniform_grid(torch.ones(2, 3)))


# ---- sweep -------------------------------------------------------------------------------------------------------


def plain_gptq(w, U, grid, mask=None):
    """The recursion with one column at a time over the whole row."""
    w = w.clone()
    for i in range(w.shape[1]):
        new = grid.nearest(w[:, i : i + 1], i)[:, 0]
        if mask is not None:
            new = new * mask[:, i]
        error = (w[:, i] - new) / U[i, i]
        w[:, i + 1 :] -= error[:, None] * U[i, i + 1 :]
        w[:, i] = new
    return w


@pytest.mark.parametrize("n_in", [24, 128, 300])
def test_blocks_of_columns_are_the_column_by_column_recursion(n_in):
    w, H = draw(5, n_in=n_in, rows=400, rank=12, dtype=torch.float64)
    grid, c = uniform_grid(w, group_size=32), Curvature.of(H)
    mask = torch.rand(w.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    assert torch.allclose(sweep(w, c, grid), plain_gptq(w, c.U, grid))
    assert torch.allclose(sweep(w, c, grid, mask=mask), plain_gptq(w, c.U, grid, mask))


def test_a_mask_chosen_on_the_way_is_a_mask():
    w, H = draw(6, n_in=200, rows=400)
    grid, c = uniform_grid(w), Curvature.of(H)
    mask = torch.rand(w.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    seen = []

    def choose(columns, start):
        seen.append((start, columns.shape[1]))
        return mask[:, start : start + columns.shape[1]]

    assert torch.equal(sweep(w, c, grid, mask=choose), sweep(w, c, grid, mask=mask))
    assert seen == [(0, 128), (128, 72)]


def test_columns_before_the_start_are_left():
    w, H = draw(7)
    grid, c = uniform_grid(w), Curvature.of(H)
    out = sweep(w, c, grid, start=10)
    assert torch.equal(out[:, :10], w[:, :10])
    assert torch.equal(grid.nearest(out)[:, 10:], out[:, 10:])


def test_without_a_grid_a_mask_is_made_good_by_later_columns_alone():
    w, H = draw(8, dtype=torch.float64)
    c = Curvature.of(H)
    mask = torch.ones_like(w, dtype=torch.bool)
    mask[:, 0] = False
    out = sweep(w, c, None, mask=mask)
    # With the first column gone and the rest free, the sweep is the optimal brain surgeon.
    rest = w[:, 1:] + torch.linalg.solve(c.H[1:, 1:], c.H[1:, :1]).T * w[:, :1]
    assert torch.allclose(out[:, 1:], rest)


def test_independent_inputs_leave_nothing_to_make_good():
    w = draw(9)[0]
    grid = uniform_grid(w)
    assert torch.equal(gptq(w, 3.0 * torch.eye(24), grid), grid.nearest(w))


def test_gptq_beats_rounding_on_correlated_inputs():
    for seed in range(5):
        w, H = draw(seed, out=64, n_in=64, rows=512, rank=16)
        grid = uniform_grid(w, bits=3)
        assert output_error(w, gptq(w, H, grid), H) < 0.7 * output_error(w, grid.nearest(w), H)


# ---- refine ------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), bits=st.integers(2, 5), symmetric=st.booleans(), pruned=st.booleans())
def test_the_error_of_no_row_rises(seed, bits, symmetric, pruned):
    w, H = draw(seed, out=6, n_in=20, dtype=torch.float64)
    grid, c = uniform_grid(w, bits=bits, group_size=8, symmetric=symmetric), Curvature.of(H)
    mask = torch.rand(w.shape, generator=torch.Generator().manual_seed(seed)) < 0.6 if pruned else None
    now = grid.nearest(w) if mask is None else grid.nearest(w) * mask
    before = quadratic(now - w, c.H)
    for _ in range(3):
        now = refine(w, now, c, grid, mask=mask, sweeps=1)
        after = quadratic(now - w, c.H)
        assert (after <= before * (1 + 1e-12)).all()
        before = after
    if mask is not None:
        assert (now[~mask] == 0).all()
    assert torch.allclose(grid.nearest(now), now)


def test_a_fixed_point_has_no_better_neighbour():
    w, H = draw(11, out=5, n_in=10, dtype=torch.float64)
    grid, c = uniform_grid(w), Curvature.of(H)
    best = refine(w, gptq(w, H, grid), c, grid, sweeps=50)
    scale = grid.scale[:, 0].double()
    base = quadratic(best - w, c.H)
    for i in range(10):
        for step in (-1, 1):
            other = best.clone()
            other[:, i] = ((best[:, i] / scale).round() + step).clamp(grid.low, grid.high) * scale
            assert (quadratic(other - w, c.H) >= base - 1e-12).all()


def test_blocks_of_columns_are_coordinate_descent():
    w, H = draw(12, out=4, n_in=150, rows=400, dtype=torch.float64)
    grid, c = uniform_grid(w), Curvature.of(H)
    now = grid.nearest(w)
    for i in range(150):
        pull = ((w - now) @ c.H)[:, i] / c.H[i, i]
        now[:, i] = grid.nearest((now[:, i] + pull)[:, None], i)[:, 0]
    assert torch.allclose(refine(w, grid.nearest(w), c, grid, sweeps=1), now)


def test_the_inputs_are_not_changed():
    w, H = draw(13)
    grid, c = uniform_grid(w), Curvature.of(H)
    rounded = grid.nearest(w)
    kept = w.clone(), rounded.clone(), H.clone()
    refine(w, rounded, c, grid)
    sweep(w, c, grid)
    gptq(w, H, grid)
    assert all(torch.equal(a, b) for a, b in zip(kept, (w, rounded, H), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gptq_in_any_dtype_and_layout(dtype):
    w, H = draw(14, dtype=dtype)
    grid = uniform_grid(w)
    out = gptq(w, H.float(), grid, rounds=1)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(out, gptq(w.T.contiguous().T, H.float().T, grid, rounds=1))


def test_the_output_error_is_that_of_the_outputs():
    g = torch.Generator().manual_seed(15)
    x, w, new = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((50, 8), (4, 8), (4, 8)))
    share = (x @ (new - w).T).square().sum() / (x @ w.T).square().sum()
    assert math.isclose(output_error(w, new, x.T @ x), float(share))
    assert output_error(torch.zeros(2, 3), torch.ones(2, 3), torch.eye(3)) == 0.0
