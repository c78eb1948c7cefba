"""Optimal brain restoration: the worked values, the order of the methods, the limits, and a whole model."""

import copy
import math
import warnings

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.compress import (
    Curvature,
    PackedLinear,
    SparseTensor,
    UniformGrid,
    block_hadamard,
    gptq,
    obr,
    obr_matrix,
    output_error,
    parse_pattern,
    prune_mask,
    refine,
    restore,
    uniform_grid,
)
from assay.compress._blockwise import matrix
from assay.compress._rotation import rotate
from assay.compress._uniform import sweep
from assay.core.anatomy import anatomy
from assay.core.errors import InputError, NotApplicable, UnknownArchitecture

WORKED = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 2.0]])


def layer(seed, *, out=64, n_in=128, rows=2048, rank=32):
    """Inputs of low rank with noise, and normal weights."""
    g = torch.Generator().manual_seed(seed)
    mix, latent = torch.randn(n_in, rank, generator=g), torch.randn(rows, rank, generator=g)
    x = latent @ mix.T / rank**0.5 + 0.3 * torch.randn(rows, n_in, generator=g)
    return torch.randn(out, n_in, generator=g) / n_in**0.5, 2 / rows * x.T @ x


def small(seed, out=6, n_in=16):
    return layer(seed, out=out, n_in=n_in, rows=64, rank=6)


# ---- the worked example ------------------------------------------------------------------------------------------


def test_the_worked_restoration():
    w = torch.tensor([[1.0, 2.0, 3.0]])
    kept = torch.tensor([[False, True, True]])
    answer = restore(-w * ~kept, kept, WORKED)
    assert torch.allclose(answer, torch.tensor([[0.0, 2 / 3, -1 / 3]]))
    assert torch.allclose(w * kept + answer, torch.tensor([[0.0, 8 / 3, 8 / 3]]))


def test_the_worked_loss_falls_from_one_to_two_thirds():
    def loss(delta):
        return 0.5 * float((delta @ WORKED @ delta.T).squeeze())

    pruned = torch.tensor([[-1.0, 0.0, 0.0]])
    assert math.isclose(loss(pruned), 1.0)
    restored = pruned + restore(pruned, torch.tensor([[False, True, True]]), WORKED)
    assert math.isclose(loss(restored), 2 / 3, rel_tol=1e-6)


def test_the_worked_loss_is_the_brain_surgeons():
    inverse = float(torch.linalg.inv(WORKED)[0, 0])
    assert math.isclose(inverse, 0.75, rel_tol=1e-6)
    assert math.isclose(0.5 * 1.0**2 / inverse, 2 / 3, rel_tol=1e-6)


def test_the_other_sign_would_double_the_error():
    """The correction for a rounding error e = w − Q(w) is +H⁻¹He."""
    imposed = torch.tensor([[0.3, 0.0, 0.0]])
    free = torch.tensor([[False, True, True]])
    answer = restore(imposed, free, WORKED)

    def loss(delta):
        return float((delta @ WORKED @ delta.T).squeeze())

    assert loss(imposed + answer) < loss(imposed) < loss(imposed - answer)


# ---- restoration -------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), n_in=st.integers(2, 24))
def test_the_gradient_vanishes_on_what_was_free(seed, share, n_in):
    w, H = small(seed, n_in=n_in)
    w, H = w.double(), Curvature.of(H).H
    kept = torch.rand(w.shape, generator=torch.Generator().manual_seed(seed)) < share
    imposed = -w * ~kept
    delta = imposed + restore(imposed, kept, H)
    assert ((delta @ H)[kept].abs() < 1e-8).all()
    assert torch.equal(delta[~kept], imposed[~kept])


def test_rows_with_sets_of_their_own_are_solved_one_by_one():
    w, H = small(0)
    w, H = w.double(), Curvature.of(H).H
    kept = torch.rand(w.shape, generator=torch.Generator().manual_seed(3)) < torch.linspace(0, 1, 6)[:, None]
    kept[0], kept[5] = False, True
    answer = restore(-w * ~kept, kept, H)
    for row, free, got in zip(w, kept, answer, strict=True):
        if free.any() and not free.all():
            right = H[free][:, ~free] @ row[~free]
            assert torch.allclose(got[free], torch.linalg.solve(H[free][:, free], right))
        assert (got[~free] == 0).all()


def test_rows_in_many_chunks_are_the_same(monkeypatch):
    from assay.compress import _obr_matrix

    w, H = small(1, out=20)
    kept = torch.rand(w.shape, generator=torch.Generator().manual_seed(4)) < 0.5
    whole = restore(-w * ~kept, kept, H)
    monkeypatch.setattr(_obr_matrix, "_SYSTEM_VALUES", 1)
    assert torch.allclose(restore(-w * ~kept, kept, H), whole, atol=1e-6)


def test_half_precision_is_computed_in_float32():
    w, H = small(2)
    kept = torch.rand(w.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    answer = restore((-w * ~kept).bfloat16(), kept, H)
    assert answer.dtype == torch.float32
    assert torch.allclose(answer, restore((-w * ~kept).bfloat16().float(), kept, H))


def test_no_row_and_no_free_weight():
    assert restore(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), WORKED).shape == (0, 3)
    assert (restore(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), WORKED) == 0).all()


def test_a_hessian_that_is_nearly_singular_is_solved_in_float64():
    v = torch.randn(16, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    H = v @ v.T + 1e-9 * torch.eye(16, dtype=torch.float64)
    w = small(3)[0]
    kept = torch.rand(w.shape, generator=torch.Generator().manual_seed(6)) < 0.7
    answer = restore(-w * ~kept, kept, H)
    assert torch.isfinite(answer).all()
    delta = (answer - w * ~kept).double()
    before = ((w * ~kept).double() @ H * (w * ~kept).double()).sum()
    assert ((delta @ H) * delta).sum() < 1e-3 * before


# ---- masks -------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    out=st.integers(1, 6),
    n_in=st.integers(1, 40),
    sparsity=st.floats(0, 1),
    scorer=st.sampled_from(["wanda", "magnitude", "random", "sparsegpt"]),
)
def test_every_row_loses_exactly_as_many(seed, out, n_in, sparsity, scorer):
    w, H = small(seed, out, n_in)
    mask = prune_mask(w, sparsity=sparsity, scorer=scorer, hessian=H, generator=torch.Generator().manual_seed(seed))
    assert ((~mask).sum(1) == int(n_in * sparsity)).all()


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), of=st.integers(1, 8), data=st.data())
def test_every_group_keeps_exactly_as_many(seed, of, data):
    kept = data.draw(st.integers(1, of))
    w, H = small(seed, 4, 3 * of)
    mask = prune_mask(w, pattern=(kept, of), hessian=H)
    assert (mask.unflatten(1, (-1, of)).sum(-1) == kept).all()


def test_the_count_of_a_whole_matrix():
    w, H = layer(0)
    for sparsity in (0.3, 0.5, 0.7):
        mask = prune_mask(w, sparsity=sparsity, hessian=H)
        assert int((~mask).sum()) == 64 * int(128 * sparsity)


def test_wanda_by_hand():
    w = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    H = torch.diag(torch.tensor([100.0, 4.0, 1.0, 0.25]))  # scores 10, 4, 3, 2
    assert prune_mask(w, hessian=H).tolist() == [[True, True, False, False]]


def test_sparsegpt_by_hand():
    # U_00² = [H⁻¹]_00 = 3/4; later columns no longer hear of the earlier ones: U_11² = 2/3, U_22² = 1/2.
    w = torch.tensor([[1.0, 0.95, 0.8]])
    curvature = Curvature.of(WORKED, damping=0.0)
    assert torch.allclose(curvature.U.diagonal().square(), torch.tensor([3 / 4, 2 / 3, 1 / 2]).double())
    scores = (w.double() / curvature.U.diagonal()).square()
    kept = prune_mask(w, sparsity=1 / 3, scorer="sparsegpt", curvature=curvature)
    assert kept.tolist() == [[i != int(scores.argmin()) for i in range(3)]]


def test_of_equal_scores_the_first_stay():
    assert prune_mask(torch.ones(1, 4), scorer="magnitude").tolist() == [[True, True, False, False]]


def test_random_masks_repeat_with_their_generator():
    w = torch.ones(8, 32)
    a, b, c = (prune_mask(w, scorer="random", generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(("given_", "read"), [("2:4", (2, 4)), ((1, 8), (1, 8)), (None, None), ("4:4", (4, 4))])
def test_patterns_are_read(given_, read):
    assert parse_pattern(given_) == read


@pytest.mark.parametrize("bad", ["24", "0:4", "5:4", "a:b", (2,), 3, "2:4:8"])
def test_patterns_that_are_none(bad):
    with pytest.raises(InputError, match="give kept:of, such as 2:4"):
        parse_pattern(bad)


def test_a_pattern_that_does_not_divide_the_width():
    with pytest.raises(InputError, match="C_in=6 is not divisible by M=4"):
        prune_mask(torch.ones(2, 6), pattern="2:4", scorer="magnitude")


@pytest.mark.parametrize("scorer", ["wanda", "sparsegpt"])
def test_a_scorer_without_its_hessian(scorer):
    with pytest.raises(InputError, match=f"scorer '{scorer}' needs the Hessian"):
        prune_mask(torch.ones(2, 4), scorer=scorer)


def test_a_mask_with_options_out_of_range():
    with pytest.raises(InputError, match="scorer is 'best': use one of wanda, magnitude, random, sparsegpt"):
        prune_mask(torch.ones(2, 4), scorer="best")
    with pytest.raises(InputError, match=r"sparsity is 1\.5: give a share from 0 to 1"):
        prune_mask(torch.ones(2, 4), sparsity=1.5, scorer="magnitude")
    with pytest.raises(InputError, match=r"shape \(2, 4\) and the Hessian \(3, 3\)"):
        prune_mask(torch.ones(2, 4), hessian=torch.eye(3))
    with pytest.raises(InputError, match="not finite"):
        prune_mask(torch.ones(2, 4), hessian=torch.diag(torch.tensor([1.0, math.nan, 1, 1])))


# ---- one matrix: limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0.25, 1.0, 7.0])
@pytest.mark.parametrize("rounding", ["rtn", "gptq"])
def test_independent_inputs_leave_pruning_and_rounding_bit_for_bit(c, rounding):
    w = layer(0)[0]
    grid = uniform_grid(w)
    new, result = obr_matrix(w, c * torch.eye(128), grid=grid, rounding=rounding)
    mask = prune_mask(w, scorer="magnitude")
    assert torch.equal(result.mask, mask)
    assert torch.equal(new, grid.nearest(w) * mask)


def test_nothing_pruned_at_eight_bits_is_the_matrix_to_half_a_step():
    w, _ = layer(1)
    grid = uniform_grid(w, bits=8, clip_search=False)
    new, _ = obr_matrix(w, torch.eye(128), sparsity=0.0, grid=grid, rounding="rtn")
    assert ((new - w).abs() <= 0.5001 * grid.scale).all()


def test_nothing_pruned_on_a_very_fine_grid_is_the_matrix():
    w, H = layer(1)
    grid = UniformGrid(w.abs().amax(1, keepdim=True) / (2**15 - 1), None, 16, 128)
    for rounding in ("rtn", "gptq"):
        new, result = obr_matrix(w, H, sparsity=0.0, grid=grid, rounding=rounding)
        assert torch.allclose(new, w, atol=20 * float(grid.scale.max()))
        assert result.error < 1e-8


@pytest.mark.parametrize("seed", range(5))
def test_no_sparsity_and_no_cut_is_plain_gptq(seed):
    w, H = layer(seed)
    grid = uniform_grid(w)
    new, _ = obr_matrix(w, H, sparsity=0.0, alpha=0.0, grid=grid)
    assert torch.equal(new, gptq(w, H, grid))


@pytest.mark.parametrize("rounding", ["rtn", "gptq"])
def test_everything_pruned_is_zero_and_nothing_is_solved(rounding, monkeypatch):
    w, H = layer(0)
    monkeypatch.setattr(torch, "cholesky_solve", None)
    new, result = obr_matrix(w, H, sparsity=1.0, rounding=rounding)
    assert (new == 0).all()
    assert (result.sparsity, result.clipped) == (1.0, 0.0)
    assert math.isclose(result.error, 1.0, rel_tol=1e-9)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("rounding", ["rtn", "gptq"])
def test_every_value_is_a_level_and_zeros_are_where_the_mask_says(bits, rounding):
    w, H = layer(2)
    new, result = obr_matrix(w, H, bits=bits, rounding=rounding)
    codes = new / result.grid.scale
    assert torch.allclose(codes, codes.round(), atol=1e-4)
    assert codes.min() >= -(2 ** (bits - 1)) - 1e-4
    assert codes.max() <= 2 ** (bits - 1) - 1 + 1e-4
    assert (new[~result.mask] == 0).all()
    assert int((~result.mask).sum()) == 64 * 64


def test_the_grid_is_that_of_the_matrix_before_pruning():
    w, H = layer(3)
    _, result = obr_matrix(w, H)
    assert torch.equal(result.grid.scale, uniform_grid(w).scale)


def test_a_pruned_input_hands_its_weight_to_its_twin():
    """Columns 0 and 5 see the same input; only 0 goes, so nothing is lost but by damping."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=g, dtype=torch.float64)
    x[:, 5] = x[:, 0]
    w = torch.randn(3, 8, generator=g, dtype=torch.float64)
    kept = torch.ones(3, 8, dtype=torch.bool)
    kept[:, 0] = False
    H = Curvature.of(x.T @ x, damping=1e-9).H
    new = w * kept + restore(-w * ~kept, kept, H)
    expected = w * kept
    expected[:, 5] += w[:, 0]
    assert torch.allclose(new, expected, atol=1e-6)
    assert torch.allclose(x @ new.T, x @ w.T, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("n_in", [5, 37, 130])
def test_the_cut_is_the_exact_column(alpha, n_in):
    w, H = layer(4, out=8, n_in=n_in, rows=400)
    grid, curvature = uniform_grid(w), Curvature.of(H)
    new, result = obr_matrix(w, H, grid=grid, alpha=alpha)
    mask, cut = result.mask, int(alpha * n_in)
    first = w * mask + restore(-w * ~mask, mask, curvature.H)
    left = grid.nearest(first[:, :cut]) * mask[:, :cut]
    assert torch.equal(new[:, :cut], left)
    imposed = torch.zeros_like(w)
    imposed[:, :cut] = left - first[:, :cut]
    right = mask & (torch.arange(n_in) >= cut)
    second = first + restore(imposed, right, curvature.H)
    assert torch.equal(new[:, cut:], sweep(second, curvature, grid, mask=mask, start=cut)[:, cut:])


def test_a_mask_of_ones_own_is_kept():
    w, H = layer(5)
    mask = prune_mask(w, hessian=H)
    assert torch.equal(obr_matrix(w, H, mask=mask)[0], obr_matrix(w, H)[0])
    other = torch.rand(w.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    new, result = obr_matrix(w, H, mask=other)
    assert torch.equal(result.mask, other)
    assert (new[~other] == 0).all()
    with pytest.raises(InputError, match=r"mask is \(64, 128\) of torch.int64: give \(64, 128\) of torch.bool"):
        obr_matrix(w, H, mask=other.long())


def test_dead_inputs_are_pruned_and_counted():
    w, H = layer(5)
    H[:7], H[:, :7] = 0, 0
    new, result = obr_matrix(w, H)
    assert (new[:, :7] == 0).all()
    assert not result.mask[:, :7].any()
    assert result.n_dead == 7


@pytest.mark.parametrize("damping", [0.0, 1e-8, 0.01])
@pytest.mark.parametrize("scorer", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("kind", ["zero", "rank one", "few rows"])
def test_a_singular_hessian_raises_nothing(kind, damping, scorer):
    w, _ = layer(6, out=8, n_in=32)
    x = torch.randn({"zero": 0, "rank one": 1, "few rows": 10}[kind], 32, generator=torch.Generator().manual_seed(0))
    H = x.T @ x
    new, result = obr_matrix(w, H, damping=damping, scorer=scorer)
    assert torch.isfinite(new).all()
    assert math.isfinite(result.error)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_named(bad):
    w, H = small(0)
    spoilt = H.clone()
    spoilt[1, 2] = spoilt[2, 1] = bad
    with pytest.raises(InputError, match="not finite"):
        obr_matrix(w, spoilt)
    with pytest.raises(InputError, match="not finite"):
        restore(-w, torch.ones_like(w, dtype=torch.bool), spoilt)
    w[0, 0] = bad
    with pytest.raises(InputError, match="not finite"):
        obr_matrix(w, H)


def test_options_out_of_range():
    w, H = small(0)
    for options, message in (
        ({"rounding": "up"}, "rounding is 'up': use one of gptq, rtn"),
        ({"alpha": -0.1}, r"alpha is -0\.1: give a share of the columns from 0 to 1"),
        ({"bits": 9}, "bits is 9"),
        ({"damping": -1.0}, r"damping is -1\.0"),
        ({"sparsity": 2.0}, r"sparsity is 2\.0"),
        ({"pattern": "3:5"}, "C_in=16 is not divisible by M=5"),
    ):
        with pytest.raises(InputError, match=message):
            obr_matrix(w, H, **options)
    with pytest.raises(InputError, match=r"the weight has shape \(6, 16\) and the Hessian \(3, 3\)"):
        obr_matrix(w, torch.eye(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_dtype_and_layout_and_the_same_twice(dtype):
    w, H = layer(7, out=16, n_in=48)
    w = w.to(dtype)
    new, result = obr_matrix(w, H)
    assert new.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    again, _ = obr_matrix(w.T.contiguous().T, H.T)
    assert torch.equal(new, again)
    wide, _ = obr_matrix(w.float(), H)
    if dtype == torch.bfloat16:
        assert torch.equal(new, wide)
    assert result.error == output_error(w.float() if dtype == torch.bfloat16 else w, new, H)


def test_a_constant_factor_in_the_hessian_changes_nothing():
    w, H = layer(8)
    assert torch.equal(obr_matrix(w, H)[0], obr_matrix(w, 4 * H)[0])


# ---- one matrix: the order of the methods ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bits", [3, 4])
def test_each_step_of_the_synthetic_layer_is_better_than_the_one_before(seed, bits):
    w, H = layer(seed)
    grid = uniform_grid(w, bits=bits)
    _, plain = obr_matrix(w, H, grid=grid, rounding="rtn")
    _, full = obr_matrix(w, H, grid=grid)
    assert full.error <= plain.error <= plain.steps["restored"]
    assert plain.error == plain.steps["rounding restored"]
    assert 3 * full.error <= full.steps["pruned"]


def test_the_synthetic_layer_beats_one_sweep_that_prunes_and_rounds():
    wins = 0
    for seed in range(5):
        w, H = layer(seed)
        grid, curvature = uniform_grid(w), Curvature.of(H)
        U = curvature.U.diagonal().float()

        def choose(columns, start, U=U):
            scores = (columns / U[start : start + columns.shape[1]]).square()
            return scores > scores.flatten().median()

        swept = output_error(w, sweep(w, curvature, grid, mask=choose), H)
        wins += obr_matrix(w, H, grid=grid)[1].error < swept
    assert wins >= 4


@pytest.mark.parametrize(
    ("step", "expected"), [("pruned", 0.080), ("restored", 0.0187), ("rounding restored", 0.0164), ("final", 0.0153)]
)
def test_the_sizes_of_the_synthetic_layers_errors(step, expected):
    """Means of five draws, without the clip search; another draw of five moves them by some 3 %."""
    errors = [obr_matrix(*layer(seed), clip_search=False)[1].steps[step] for seed in range(5)]
    assert sum(errors) / 5 == pytest.approx(expected, rel=0.06)


def test_coordinate_descent_lowers_what_is_left():
    for seed in range(5):
        w, H = layer(seed)
        new, result = obr_matrix(w, H)
        better = refine(w, new, Curvature.of(H), result.grid, mask=result.mask)
        assert output_error(w, better, H) < result.error
        assert (better[~result.mask] == 0).all()


def test_the_digits_keep_their_classes():
    """Every layer of a small network at 4 bits, 60 % and 70 % pruned."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPClassifier

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.3, random_state=0, stratify=y)
    net = MLPClassifier((128, 128), max_iter=40, random_state=0, early_stopping=False)
    with warnings.catch_warnings(action="ignore"):  # forty passes are enough here
        net.fit(x_train, y_train)
    assert net.score(x_test, y_test) > 0.95

    def accuracy(sparsity, restored):
        h, t = torch.tensor(x_train).float(), torch.tensor(x_test).float()
        for i, (w, b) in enumerate(zip(net.coefs_, net.intercepts_, strict=True)):
            weight, bias = torch.tensor(w.T).float(), torch.tensor(b).float()
            H = h.T @ h
            new, result = obr_matrix(weight, H, sparsity=sparsity)
            if not restored:
                new = result.grid.nearest(weight) * result.mask
            h, t = h @ new.T + bias, t @ new.T + bias
            if i < len(net.coefs_) - 1:
                h, t = h.relu(), t.relu()
        return float((t.argmax(1).numpy() == y_test).mean())

    for sparsity in (0.6, 0.7):
        assert accuracy(sparsity, True) > accuracy(sparsity, False) + 0.02


# ---- results -----------------------------------------------------------------------------------------------------


def test_the_result_of_a_matrix():
    _, result = obr_matrix(*layer(9))
    assert [row[0] for row in result.table()] == ["pruned", "restored", "rounding restored", "final"]
    assert "50.0% pruned, 4 bits" in str(result.table())
    assert len(result.figure().data) == 1
    assert set(result.to_dict()) >= {"error", "steps", "clipped", "sparsity", "bits"}
    assert 0 <= result.clipped < 0.2


# ---- rotation ----------------------------------------------------------------------------------------------------

SIZE = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
ROTATED = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True)),
    "llama, tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZE)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZE, head_dim=8)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SIZE)),
}


def make(name="llama"):
    torch.manual_seed(0)
    model = ROTATED[name]().eval()
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.mul_(3) if p.ndim > 1 else p.add_(0.3 * torch.randn(p.shape)) if "norm" in n else None
    return model


def ids(rows=6, tokens=20):
    return torch.randint(3, 40, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("n", "blocks"), [(1, 1), (8, 8), (576, 64), (24, 8), (768, 256)])
def test_the_hadamard_matrix_of_a_width(n, blocks):
    H = block_hadamard(n)
    assert torch.allclose(H @ H.T, torch.eye(n, dtype=torch.float64))
    assert set(H.abs().unique().tolist()) <= {0.0, blocks**-0.5} or math.isclose(float(H.abs().max()), blocks**-0.5)
    assert int((H != 0).sum()) == n * blocks


@pytest.mark.parametrize("name", ROTATED)
def test_a_rotated_model_says_the_same(name):
    model = make(name)
    with torch.no_grad():
        before = model(ids()).logits
        old = model.model.layers[0].self_attn.o_proj.weight.clone()
        undo = rotate(anatomy(model))
        after = model(ids()).logits
    assert torch.allclose(before, after, rtol=1e-4, atol=1e-5 * float(before.abs().max()))
    assert not torch.allclose(old, model.model.layers[0].self_attn.o_proj.weight, atol=1e-2)
    assert (model.model.norm.weight == 1).all()
    undo()
    with torch.no_grad():
        assert torch.equal(model(ids()).logits, before)


def test_a_tied_head_gets_a_weight_of_its_own_and_comes_back():
    model = make("llama, tied")
    undo = rotate(anatomy(model))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False
    undo()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is True


def test_a_loud_channel_is_spread():
    """What rotation is for: no input of a layer stands out."""
    model = make("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] *= 30
    seen = []
    for _ in range(2):
        handle = model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
            lambda _, a: seen.append(a[0].detach())
        )
        model(ids())
        handle.remove()
        rotate(anatomy(model))
    share = [float(x.abs().amax(-1).mean() / x.square().mean(-1).sqrt().mean()) for x in seen]
    assert share[1] < 0.8 * share[0]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (
            lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_embd=24, n_layer=1, n_head=4)),
            "plain linear layers",
        ),
        (
            lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZE, head_dim=8)),
            "stands between its layers and the residual stream",
        ),
        (lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZE, num_local_experts=2)), "mixture of experts"),
        (
            lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**{k: v for k, v in SIZE.items() if "key_value" not in k})),
            "not RMS norms",
        ),
    ],
)
def test_what_cannot_be_rotated_says_why(build, why):
    model = build()
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(NotApplicable, match=why):
        obr(model, ids(), rotate=True)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


# ---- a whole model -----------------------------------------------------------------------------------------------


def packed_layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, PackedLinear)}


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_model_is_packed_and_runs(name, turned):
    model = make(name)
    returned, result = obr(model, ids(), rotate=turned)
    assert returned is model
    layers = packed_layers(model)
    assert {x.name for x in result.layers} == set(layers)
    assert all(type(m.packed) is SparseTensor for m in layers.values())
    assert result.sparsity == pytest.approx(0.5)
    assert result.rotated is turned
    assert torch.isfinite(model(ids()).logits).all()
    assert result.bits_per_weight == pytest.approx(
        sum(m.packed.bits_per_weight * m.packed.shape.numel() for m in layers.values())
        / sum(m.packed.shape.numel() for m in layers.values())
    )
    total = sum(p.numel() for p in make(name).parameters())
    untied = 0 if not turned or not make(name).config.tie_word_embeddings else 40 * 24
    assert result.n_other + result.n_weights == total + untied


def test_the_first_layers_are_those_of_the_matrix_alone():
    model = make()
    original = copy.deepcopy(model)
    seen = []
    original.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, a: seen.append(a[0].flatten(0, 1)))
    original(ids())
    x = torch.cat(seen).detach()
    w = matrix(original.model.layers[0].self_attn.q_proj)
    grid = uniform_grid(w, scale_dtype=torch.bfloat16)
    alone, about = obr_matrix(w, x.T @ x / len(x), grid=grid)
    model, result = obr(model, ids())
    assert (model.model.layers[0].self_attn.q_proj.weight - alone).abs().max() < 1e-6
    assert result.layers[0].error == pytest.approx(about.error, rel=1e-3)


def test_restoration_keeps_the_model_closer():
    before = make()(ids()).logits.log_softmax(-1)

    def drift(model):
        return float((before.exp() * (before - model(ids()).logits.log_softmax(-1))).sum(-1).mean())

    with torch.no_grad():
        plain = make()
        model, result = obr(make(), ids(20, 30))
        for name in packed_layers(model):
            target = plain.get_submodule(name)
            w = matrix(target)
            kept = model.get_submodule(name).weight != 0
            target.weight.copy_(uniform_grid(w).nearest(w) * kept)
        assert drift(model) < drift(plain)
    assert all(x.error < x.pruned_error for x in result.layers)


def test_coordinate_descent_over_a_model():
    _, plain = obr(make(), ids())
    _, more = obr(make(), ids(), rounds=3)
    assert more.layers[0].error < plain.layers[0].error
    assert more.error < plain.error


def test_biases_names_and_modes_stay():
    model = make().train()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("bias")}
    model, _ = obr(model, ids())
    for name, bias in before.items():
        assert torch.equal(dict(model.named_parameters())[name], bias)
    assert all(m.training for m in model.modules())
    assert type(model.lm_head) is torch.nn.Linear


def test_patterns_and_skips():
    model, result = obr(make(), ids(), pattern="2:4", skip=("down_proj",), group_size=8, bits=3)
    assert set(result.left) == {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    w = packed_layers(model)["model.layers.0.mlp.up_proj"].packed
    assert ((w.dequantize() != 0).unflatten(1, (-1, 4)).sum(-1) <= 2).all()
    assert (w.bits, w.group_size, w.kept) == (3, 8, 12)


def test_twice_the_same():
    a, b = (obr(make(), ids())[0] for _ in range(2))
    for name, layer_ in packed_layers(a).items():
        assert torch.equal(layer_.weight, packed_layers(b)[name].weight)


@pytest.mark.parametrize("turned", [False, True])
def test_an_error_leaves_the_model_as_it_was(turned):
    model = make("llama, tied")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(InputError, match=r"layer model\.layers\.1\.mlp\.down_proj: the weight has"):
        obr(model, ids(), rotate=turned)
    assert not packed_layers(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(before[n].nan_to_num(), p.nan_to_num()) for n, p in model.named_parameters())
    assert getattr(model.config, "quantization_config", None) is None


def test_too_few_tokens_are_noted():
    _, result = obr(make(), ids(1, 4))
    assert all(x.note.startswith("too few tokens came here") for x in result.layers)


def test_what_it_refuses():
    for windows, said in (
        (torch.zeros(3, dtype=torch.int64), r"\(3,\) of torch.int64"),
        (torch.zeros(2, 3), "float32"),
    ):
        with pytest.raises(InputError, match=f"windows is .*{said}.*: pass token ids"):
            obr(make(), windows)
    with pytest.raises(InputError, match="windows is list"):
        obr(make(), [[1, 2]])
    with pytest.raises(InputError, match="there are no windows of text"):
        obr(make(), torch.zeros(0, 8, dtype=torch.int64))
    with pytest.raises(InputError, match="C_in=24 is not divisible by M=5"):
        obr(make(), ids(), pattern="2:5")
    with pytest.raises(InputError, match="bits is 1"):
        obr(make(), ids(), bits=1)
    with pytest.raises(InputError, match="rounds is -1"):
        obr(make(), ids(), rounds=-1)
    with pytest.raises(NotApplicable, match="has no layer to pack in its blocks"):
        obr(make(), ids(), skip=("model",))
    with pytest.raises(NotApplicable, match="next-token loss needs a causal language model"):
        obr(hf.BertModel(hf.BertConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2)), ids())
    with pytest.raises(UnknownArchitecture):
        obr(torch.nn.Linear(2, 2), ids())


def test_the_result_of_a_model():
    _, result = obr(make(), ids())
    assert len(result.table()) == 14
    assert "50.0% pruned, 4 bits" in str(result.table())
    assert [trace.name for trace in result.figure().data] == ["pruned and rounded", "restored"]
    as_dict = result.to_dict()
    assert as_dict["tokens"] == 120
    assert len(as_dict["layers"]) == 14
    assert as_dict["layers"][0]["name"] == "model.layers.0.self_attn.q_proj"
