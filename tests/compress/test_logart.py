"""LogART: known levels and roundings, invariances, the count of codes, the search, learned rounding, packed layers."""

import copy
import io
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from assay.compress import (
    LogConv2d,
    LogGrid,
    LogTensor,
    learn_block_rounding,
    learn_rounding,
    logart,
    logart_weight,
    search_log_grid,
)
from assay.compress import _logart as method
from assay.compress import _loggrid as grids
from assay.compress._packed_linear import PackedLinear
from assay.core.errors import InputError, NotApplicable
from assay.reference import checkpoint, tiny_vit

PLAIN = {"asymmetric": False, "scale_search": False}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def heavy(rows=64, columns=128, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_t(4, (rows, columns)) * 0.05).float()


def correlated(n_in=128, n=1024, seed=1):
    mix = normal(n_in, n_in, seed=seed) / math.sqrt(n_in) + 0.5 * torch.eye(n_in)
    return normal(n, n_in, seed=seed + 1) @ mix


def one_row(bits, base2, top=0, skew=0, percent=100, **options):
    return LogGrid(
        bits,
        torch.tensor([top], dtype=torch.int16),
        torch.tensor([base2], dtype=torch.uint8),
        torch.tensor([skew], dtype=torch.int8),
        torch.tensor([percent], dtype=torch.uint8),
        **options,
    )


def output_error(w, rounded, gram):
    gap = (rounded - w).double()
    return (((gap @ gram.double()) * gap).sum() / ((w.double() @ gram.double()) * w.double()).sum()).item()


# ---- known values ------------------------------------------------------------------------------------------------


def test_log2_levels_of_3_bits():
    grid = search_log_grid(torch.tensor([[1.0, -1.0, 0.3]]), bits=3, base="log2", strict=False, **PLAIN)
    assert grid.levels.tolist() == [[-1, -0.5, -0.25, -0.125, 0, 0.125, 0.25, 0.5, 1]]


def test_dynamic_levels_border_and_roundings_of_3_bits():
    grid = one_row(3, 2, strict=False)
    assert grid.levels[0, 5:].tolist() == pytest.approx([0.25, 0.5, 0.70711, 1.0], abs=1e-5)
    borders = grid._tables(torch.float32)[1]
    assert borders[0, 6].item() == pytest.approx(0.594604, abs=1e-6)
    rounded, _ = grid.quantize(torch.tensor([[0.55, 0.65, -0.55, -0.65]]))
    assert rounded[0].tolist() == pytest.approx([0.5, 0.70711, -0.5, -0.70711], abs=1e-5)


def test_sigma_is_half_at_zero():
    assert torch.sigmoid(torch.tensor(0.0)) * method._WIDTH + method._LOW == pytest.approx(0.5)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_start_inverts_sigma(share):
    between = method._Between(torch.tensor([[2**-share]]), torch.tensor([[0.5, 1.0]], dtype=torch.float32))
    r = between.start()
    assert (torch.sigmoid(r) * 1.2 - 0.1).item() == pytest.approx(1 - share, abs=1e-6)
    assert between.soft(between.share)[0].item() == pytest.approx(2**-share, abs=1e-6)


def test_hard_limits_are_the_larger_and_the_smaller_magnitude():
    between = method._Between(torch.tensor([[0.6, -0.6]]), torch.tensor([[-1.0, -0.5, 0.0, 0.5, 1.0]]))
    assert between.hard(torch.full((1, 2), 10.0))[0].tolist() == [[1.0, -1.0]]
    assert between.hard(torch.full((1, 2), -10.0))[0].tolist() == [[0.5, -0.5]]


@pytest.mark.parametrize(("terms", "ratio"), [(2, 1.06066), (3, 1.01647), (4, 1.00542)])
def test_hardware_approximations_of_root_2(terms, ratio):
    exact, approximate = one_row(3, 2, strict=False), one_row(3, 2, strict=False, hardware_terms=terms)
    quotient = (approximate.levels / exact.levels)[0, 5:]
    assert quotient.tolist() == pytest.approx([1, 1, ratio, 1], abs=1e-5)


def test_weights_on_the_grid_stay():
    w = torch.tensor([[1.0, -1.0, 0.5, 0.25, -0.125, 0.0, 0.125, -0.5]])
    grid = search_log_grid(w, bits=4, base="log2")
    assert torch.equal(grid.quantize(w)[0], w)
    learned = learn_rounding(w, grid, torch.eye(8) + 1, iters=50)
    assert torch.equal(grid.dequantize(learned.codes), w)
    assert (learned.before, learned.after, learned.flipped) == (0, 0, 0)


def published(x, w_max, w_min, scale, base2, bits):
    """The authors' rule, element by element in plain Python, for the non-strict grid of two bases."""
    n_magnitudes = 2 ** (bits - 1)
    fine = n_magnitudes - base2
    half_up = lambda v: math.floor(v + 0.5)  # noqa: E731
    q_top = half_up(2 * math.log2(max(w_max, -w_min)))
    q_low, p_top = q_top - fine + 1, (q_top - fine) // 2
    p_low = p_top - base2 + 1
    border = 2 ** ((q_low / 2 + p_top) / 2)
    small = min(w_max, -w_min)
    if small > border:
        d = abs(q_top - half_up(2 * math.log2(small)))
    else:
        d = fine + abs(p_top - half_up(math.log2(small)))
    d = min(d, 2**bits)
    if abs(x) <= border:
        q = round(math.log2(abs(x) / scale)) - p_low
        if max(q, -1 - d / 2) <= -1 - d / 2:
            return 0.0
        exponent = min(q, base2 - 1) + p_low
    else:
        exponent = min(max(round(2 * math.log2(abs(x) / scale)), q_low), q_top) / 2
    return math.copysign(scale * 2**exponent, x)


@pytest.mark.parametrize("base2", [2, 4, 6])
@pytest.mark.parametrize(("scale", "bits"), [(1.0, 4), (0.8, 4), (0.37, 4), (0.6, 3)])
def test_without_strict_it_rounds_as_published(scale, bits, base2):
    if base2 >= 2 ** (bits - 1):
        pytest.skip("this many powers of 2 leave no second base")
    w = heavy(6, 200, seed=3).double()
    ends = w.amax(1), (-w).amax(1)
    top, skew = grids._reach(
        *ends, w.sum(1), torch.tensor([base2]), torch.tensor([round(100 * scale)]), bits, True, False
    )
    grid = LogGrid(
        bits,
        top[:, 0].to(torch.int16),
        torch.full((6,), base2, dtype=torch.uint8),
        skew[:, 0].to(torch.int8),
        torch.full((6,), round(100 * scale), dtype=torch.uint8),
        strict=False,
    )
    rounded, _ = grid.quantize(w)
    for row in range(6):
        high, low = w[row].max().item(), w[row].min().item()
        expected = [published(x, high, low, scale, base2, bits) for x in w[row].tolist()]
        np.testing.assert_allclose(rounded[row].numpy(), expected, rtol=1e-12)


# ---- invariances -------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    bits=st.integers(2, 6),
    base=st.sampled_from(["dynamic", "log2", "sqrt2"]),
    asymmetric=st.booleans(),
    power=st.integers(-20, 20),
)
def test_powers_of_two_signs_and_the_count_of_codes(seed, bits, base, asymmetric, power):
    w = normal(5, 40, seed=seed) * torch.exp(normal(5, 1, seed=seed + 1)) + 0.3 * normal(5, 1, seed=seed + 2)
    options = {"bits": bits, "base": base, "asymmetric": asymmetric}
    grid = search_log_grid(w, **options)
    rounded, codes = grid.quantize(w)
    assert int(codes.max()) < 2**bits
    assert grid.levels.shape == (5, 2**bits)
    assert (grid.levels.diff(dim=1) > 0).all()
    assert torch.equal(grid.dequantize(codes), rounded)
    assert torch.equal(grid.quantize(rounded)[0], rounded)
    assert torch.equal(search_log_grid(w * 2.0**power, **options).quantize(w * 2.0**power)[0], rounded * 2.0**power)
    assert torch.equal(search_log_grid(-w, **options).quantize(-w)[0], -rounded)


def test_rows_do_not_depend_on_each_other():
    w, gram = heavy(), correlated().T @ correlated()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    grid, permuted = search_log_grid(w, gram, bits=3), search_log_grid(w[order], gram, bits=3)
    assert torch.equal(grid.quantize(w)[0][order], permuted.quantize(w[order])[0])
    first, second = learn_rounding(w, grid, gram, iters=20), learn_rounding(w[order], permuted, gram, iters=20)
    # Products of float32 matrices may differ in their last digit with the place of a row.
    assert float((first.codes[order] != second.codes).float().mean()) < 1e-3


def test_scale_of_the_gram_matrix_does_not_matter():
    w, gram = heavy(), correlated().T @ correlated()
    a, b = (logart(w, gram=g, bits=3, iters=30)[0].dequantize() for g in (gram, gram * 2**20))
    assert torch.equal(a, b)


def test_one_sign_and_zero_rows():
    w = torch.stack([normal(64).abs(), -normal(64).abs(), torch.zeros(64)])
    grid = search_log_grid(w, bits=3)
    rounded, _ = grid.quantize(w)
    # The absent sign lends all its codes but one for zero.
    assert (grid.levels[0] >= 0).all()
    assert (grid.levels[1] <= 0).all()
    assert torch.equal(rounded[2], w[2])
    packed, cost = logart(w, gram=torch.eye(64), bits=3, iters=20)
    assert torch.equal(packed.dequantize()[2], w[2])
    assert cost.layers[0].output_error < 0.03


def test_asymmetry_gains_where_signs_differ_and_is_the_same_grid_where_they_do_not():
    w = normal(16, 256)
    skewed = torch.where(w < 0, w / 8, w)
    errors = [
        (search_log_grid(skewed, bits=3, asymmetric=a).quantize(skewed)[0] - skewed).norm() for a in (True, False)
    ]
    assert errors[0] < 0.9 * errors[1]
    even = torch.cat([w, -w], 1)
    a, b = (search_log_grid(even, bits=3, asymmetric=a, scale_search=False) for a in (True, False))
    assert torch.equal(a.levels, b.levels)


def test_as_published_there_are_more_codes_than_bits_hold():
    w = heavy()
    symmetric = search_log_grid(w, bits=3, strict=False, asymmetric=False)
    assert symmetric.n_codes == 9
    assert symmetric.code_bits == 4
    asymmetric = search_log_grid(w, bits=3, strict=False)
    used = max(len(row.unique()) for row in asymmetric.quantize(w)[1])
    assert used > 9
    packed, _ = logart(w, bits=3, strict=False)
    assert packed.bits_per_weight > 4


# ---- search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_the_running_sums_give_the_error_of_every_candidate(strict):
    w = heavy(4, 50).double()
    candidates = grids._Candidates(3, "dynamic", True, True, None, strict, w.device)
    everything = torch.arange(candidates.n).expand(4, -1)
    top, skew = grids._reach(w.amax(1), (-w).amax(1), w.sum(1), candidates.base2, candidates.percent, 3, True, strict)
    importance = normal(50, seed=4).abs().double().expand(4, -1)
    sums = grids._RunningSums(w, importance)
    fast = candidates._separable_cost(sums, top, skew, everything)
    levels, borders = candidates._tables(top, skew, everything, torch.float64)
    spread = w[:, None].expand(-1, candidates.n, -1).contiguous()
    rounded = levels.gather(2, torch.searchsorted(borders, spread))
    slow = (importance[:, None] * ((rounded - spread) ** 2 - spread**2)).sum(-1)
    np.testing.assert_allclose(fast.numpy(), slow.numpy(), rtol=1e-9, atol=1e-12)


def test_full_search_is_no_worse_than_the_shortlist_and_the_shortlist_is_near():
    w, gram = heavy(), correlated().T @ correlated()
    full, short = (search_log_grid(w, gram, bits=3, shortlist=k).quantize(w)[0] for k in (None, 8))
    best, near = output_error(w, full, gram), output_error(w, short, gram)
    assert best <= near < 1.06 * best


def test_full_search_is_the_minimum_over_candidates_of_one_base():
    w = heavy(3, 60)
    grid = search_log_grid(w, bits=3, base="log2", shortlist=None)
    errors = []
    for percent in range(1, 101):
        candidates = grids._Candidates(3, "log2", True, True, None, True, w.device)
        top, skew = grids._reach(
            *(e.double() for e in (w.amax(1), (-w).amax(1))),
            w.double().sum(1),
            candidates.base2,
            candidates.percent,
            3,
            True,
            True,
        )
        at = 100 - percent
        trial = LogGrid(
            3,
            top[:, at].to(torch.int16) if top.shape[1] > 1 else top[:, 0].to(torch.int16),
            torch.full((3,), 4, dtype=torch.uint8),
            skew[:, at].to(torch.int8),
            torch.full((3,), percent, dtype=torch.uint8),
        )
        errors.append((trial.quantize(w)[0] - w).square().sum(1))
    np.testing.assert_allclose(
        (grid.quantize(w)[0] - w).square().sum(1).numpy(), torch.stack(errors).amin(0).numpy(), rtol=1e-5
    )


def test_inputs_and_their_gram_matrix_are_the_same():
    w, x = heavy(), correlated()
    a, b = search_log_grid(w, x=x), search_log_grid(w, x.T @ x / len(x))
    assert torch.equal(a.levels, b.levels)


@pytest.mark.parametrize("bits", [3, 4])
def test_each_part_lowers_the_output_error(bits):
    w, gram = heavy(), correlated().T @ correlated()
    errors = []
    for options in ({"base": "log2", **PLAIN}, PLAIN, {"asymmetric": False}, {}):
        grid = search_log_grid(w, gram, bits=bits, **options)
        errors.append(output_error(w, grid.quantize(w)[0], gram))
    errors.append(learn_rounding(w, grid, gram, iters=200).after)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.7 * errors[-2]


def test_published_trend_of_a_heavy_tailed_layer():
    # Relative output errors at 3 bits: base 2 below base √2, which has no level near zero.
    w, gram = heavy(), correlated().T @ correlated()
    errors = {
        base: math.sqrt(
            output_error(w, search_log_grid(w, gram, bits=3, base=base, strict=False, **PLAIN).quantize(w)[0], gram)
        )
        for base in ("log2", "sqrt2")
    }
    assert errors["log2"] == pytest.approx(0.25, abs=0.03)
    assert errors["sqrt2"] > 0.9


# ---- learned rounding --------------------------------------------------------------------------------------------


def test_learning_reports_what_the_codes_cost():
    w, gram = heavy(), correlated().T @ correlated()
    grid = search_log_grid(w, gram, bits=3)
    learned = learn_rounding(w, grid, gram, iters=200)
    assert learned.before == pytest.approx(output_error(w, grid.quantize(w)[0], gram), rel=1e-4)
    assert learned.after == pytest.approx(output_error(w, grid.dequantize(learned.codes), gram), rel=1e-4)
    nearest = grid.quantize(w)[1]
    assert learned.flipped == pytest.approx(float((learned.codes != nearest).float().mean()))
    assert 0.05 < learned.flipped < 0.4


def test_learned_codes_are_neighbours_of_the_weight():
    w, gram = heavy(), correlated().T @ correlated()
    grid = search_log_grid(w, gram, bits=3)
    codes = learn_rounding(w, grid, gram, iters=100).codes.long()
    at = torch.searchsorted(grid.levels, w)
    assert ((codes == at.clamp(max=7)) | (codes == (at - 1).clamp(min=0))).all()


def test_soft_values_harden():
    w, gram = heavy(), correlated().T @ correlated()
    grid = search_log_grid(w, gram, bits=3)
    learned, without = (learn_rounding(w, grid, gram, penalty=p) for p in (1.0, 0.0))
    assert learned.undecided < 0.02
    assert abs(learned.gap) < 0.1 * learned.after
    assert without.undecided > 0.2
    assert without.gap > 0.5 * without.after


def test_the_gradient_in_closed_form_is_that_of_autograd():
    w = heavy(3, 10).double()
    levels = search_log_grid(w, bits=3)._tables(torch.float64)[0]
    between = method._Between(w, levels)
    sigma = torch.rand(3, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    value, slope = between.soft(sigma)
    (gradient,) = torch.autograd.grad(value.sum(), sigma)
    assert torch.allclose(gradient, slope)


def test_learning_is_deterministic_and_never_worse():
    w, gram = heavy(), correlated().T @ correlated()
    grid = search_log_grid(w, gram)
    a, b = (learn_rounding(w, grid, gram, iters=5) for _ in range(2))
    assert torch.equal(a.codes, b.codes)
    assert a.after <= a.before


def test_rows_with_groups_are_learned_with_their_own_gram_matrix():
    w, x = heavy(8, 32), torch.stack([correlated(32, 100), 3 * correlated(32, 100, seed=7)])
    gram = x.transpose(1, 2) @ x
    together = logart(w, gram=gram, bits=3, iters=20)[0].dequantize()
    # The common scale of both matrices does not matter, so each half can be learned alone.
    alone = torch.cat([logart(w[4 * k : 4 * k + 4], gram=gram[k], bits=3, iters=20)[0].dequantize() for k in (0, 1)])
    assert float((together != alone).float().mean()) < 0.01


def test_block_learning_lowers_the_error_of_the_block():
    generator = torch.Generator().manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    for p in block.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 4
    x = torch.randn(256, 16, generator=generator)
    target = block(x).detach()
    found = {n: search_log_grid(block.get_submodule(n).weight, bits=3) for n in ("0", "2")}
    before = copy.deepcopy(block.state_dict())
    codes = learn_block_rounding(block, x, target, found, iters=150, generator=generator)
    assert all(torch.equal(before[k], v) for k, v in block.state_dict().items())

    def error(codes_of):
        changed = copy.deepcopy(block)
        for n, grid in found.items():
            changed.get_submodule(n).weight.data = grid.dequantize(codes_of[n])
        return (changed(x) - target).square().mean().item()

    nearest = {n: grid.quantize(block.get_submodule(n).weight)[1] for n, grid in found.items()}
    assert error(codes) < 0.6 * error(nearest)


# ---- packed form -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_packing_is_exact_and_counts_its_bits(bits):
    w = heavy(7, 120)
    packed = logart_weight(w, bits=bits)
    grid = search_log_grid(w, bits=bits)
    assert torch.equal(packed.dequantize(), grid.quantize(w)[0])
    assert packed.bits_per_weight == pytest.approx(bits + 40 / 120)
    assert torch.equal(packed.decode(13, 500), packed.dequantize().view(-1)[13:500])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_types_and_strides(dtype):
    w = heavy(8, 64).to(dtype)
    a, b = logart_weight(w), logart_weight(w.T.contiguous().T)
    assert a.dequantize().dtype == dtype
    assert torch.equal(a.dequantize(), b.dequantize())
    relative = (a.dequantize().double() - w.double()).norm() / w.double().norm()
    assert relative < 0.15


@pytest.mark.parametrize("bias", [True, False])
def test_layer_computes_with_the_decoded_weight_and_round_trips(bias):
    layer = nn.Linear(48, 16, bias=bias)
    new, _ = logart(layer, bits=3)
    assert isinstance(new, PackedLinear)
    assert isinstance(new.packed, LogTensor)
    x = normal(5, 48).requires_grad_()
    expected = nn.functional.linear(x, new.weight, new.bias)
    assert torch.allclose(new(x), expected, atol=1e-6)
    (gradient,) = torch.autograd.grad(new(x).sum(), x)
    assert torch.allclose(gradient, new.weight.sum(0).expand(5, -1), atol=1e-5)
    buffer = io.BytesIO()
    torch.save(new.state_dict(), buffer)
    buffer.seek(0)
    other, _ = logart(nn.Linear(48, 16, bias=bias), bits=3)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), new(x))
    half = copy.deepcopy(new).to(torch.bfloat16)
    assert half(x.to(torch.bfloat16)).dtype == torch.bfloat16
    assert torch.equal(half.weight, new.weight)


def test_loading_replaces_the_levels():
    a, b = (logart(nn.Linear(32, 4), bits=4)[0] for _ in range(2))
    b(torch.ones(1, 32))
    b.load_state_dict(a.state_dict())
    assert torch.equal(a.weight, b.weight)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_convolutions_with_groups_padding_and_stride(groups):
    torch_generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=groups), nn.ReLU(), nn.Conv2d(16, 4, 1))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=torch_generator) / 3
    x = torch.randn(6, 8, 9, 9, generator=torch_generator)
    before = model(x).detach()
    gram, n = method._grams(model, {"0": model[0]}, [x])["0"]
    assert gram.shape == (groups, 72 // groups, 72 // groups)
    assert n == 6 * 25
    # The quadratic form of the weights is the energy of the outputs without bias.
    rows = model[0].weight.detach().flatten(1).view(groups, -1, 72 // groups)
    energy = ((rows @ gram) * rows).sum()
    assert energy.item() == pytest.approx(
        (model[0](x) - model[0].bias.view(1, -1, 1, 1)).square().sum().item(), rel=1e-4
    )
    packed, cost = logart(model, [x], bits=4, iters=50)
    assert isinstance(packed[0], LogConv2d)
    assert isinstance(packed[0], nn.Conv2d)
    assert (packed(x) - before).norm() < 0.15 * before.norm()
    assert cost.layers[0].output_error <= cost.layers[0].nearest_error
    fresh = copy.deepcopy(packed)
    fresh.load_state_dict(packed.state_dict())
    assert torch.equal(fresh(x), packed(x))


def test_depthwise_is_not_slower_by_rows():
    # One product a batch of groups, whatever their number.
    conv = nn.Conv2d(256, 256, 3, groups=256, padding=1)
    x = normal(2, 256, 6, 6)
    packed, cost = logart(nn.Sequential(conv), [x], bits=4, iters=5)
    assert cost.layers[0].output_error < 0.05
    assert packed[0].packed.shape == (256, 1, 3, 3)


# ---- models ------------------------------------------------------------------------------------------------------


def language_model():
    from assay.reference._text import sample

    opened = checkpoint("builtin:tiny-lm")
    ids = torch.tensor(opened.tokenizer()(sample("prose"), verbose=False)["input_ids"][:2048]).view(-1, 128)
    return opened.load(torch.float32), ids


def test_language_model_by_layer_keeps_its_predictions():
    model, ids = language_model()
    with torch.no_grad():
        exact = model(ids).logits
        nearest = logart(copy.deepcopy(model), bits=3)[0](ids).logits
        packed, cost = logart(model, [ids[:8], ids[8:]], bits=3, iters=100)
        learned = packed(ids).logits
    assert (learned - exact).norm() < 0.8 * (nearest - exact).norm()
    assert len(cost.layers) == 28
    assert all(layer.output_error <= layer.nearest_error for layer in cost.layers)
    assert cost.layers[0].n_inputs == 2048
    assert 3.1 < cost.bits_per_weight < 3.4
    assert packed.lm_head.weight is packed.model.embed_tokens.weight


def test_language_model_by_block():
    model, ids = language_model()
    ids = ids[:, :64]
    with torch.no_grad():
        exact = model(ids).logits
    errors = []
    for iters in (0, 150):
        packed, cost = logart(
            copy.deepcopy(model),
            [ids],
            bits=3,
            iters=iters,
            granularity="block",
            blocks=["model.layers.0"],
            generator=torch.Generator().manual_seed(0),
        )
        with torch.no_grad():
            errors.append((packed(ids).logits - exact).norm().item())
    assert errors[1] < errors[0]
    assert cost.granularity == "block"
    assert [layer.flipped > 0 for layer in cost.layers] == [True] * 7 + [False] * 21


def test_vision_transformer_keeps_its_accuracy():
    model = checkpoint("builtin:tiny-vit").load(torch.float32)
    images, labels = tiny_vit.images("test"), tiny_vit.labels("test")
    calibration = [tiny_vit.images("train")[:64]]

    def accuracy(m):
        with torch.no_grad():
            return (m(images).logits.argmax(-1) == labels).float().mean().item()

    full = accuracy(model)
    packed, cost = logart(model, calibration, bits=4, iters=100)
    assert accuracy(packed) > full - 0.03
    assert any(len(layer.shape) == 4 for layer in cost.layers)


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
def test_digits_network_keeps_the_published_order():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPClassifier

    x, y = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(x / 16, y, test_size=0.5, random_state=0)
    fitted = MLPClassifier((64,), max_iter=60, random_state=0, learning_rate_init=0.01).fit(train_x, train_y)
    weights = [torch.from_numpy(w.T.copy()).float() for w in fitted.coefs_]
    biases = [torch.from_numpy(b).float() for b in fitted.intercepts_]
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    for layer, w, b in zip(layers[::2], weights, biases, strict=True):
        layer.weight.data, layer.bias.data = w, b
    model = nn.Sequential(*layers)
    inputs, tests = torch.from_numpy(train_x).float(), torch.from_numpy(test_x).float()

    def of(**options):
        packed, _ = logart(copy.deepcopy(model), [inputs[:256]], bits=3, **options)
        with torch.no_grad():
            logits = packed(tests)
            return (logits - model(tests)).square().mean().item(), (logits.argmax(1).numpy() == test_y).mean()

    arms = [
        of(base="log2", iters=0, **PLAIN),
        of(iters=0, **PLAIN),
        of(iters=0, asymmetric=False),
        of(iters=0),
        of(),
    ]
    errors, accuracies = zip(*arms, strict=True)
    assert errors[0] > errors[2] > errors[4]
    assert errors[1] <= 1.05 * errors[0]
    # The order of accuracies holds within noise: two standard errors of a proportion on 899 digits.
    assert accuracies[4] >= accuracies[0] - 0.01
    assert accuracies[4] > 0.9


def test_an_error_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data[0, 0] = math.nan
    with pytest.raises(InputError, match="layer 1: weight has 1 non-finite entries"):
        logart(model)
    assert all(type(m) is nn.Linear for m in model)


def test_shared_skipped_and_unreached_layers():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    _, cost = logart(model, skip=("3",))
    assert cost.left == {
        "0": "weight shared with another module",
        "1": "weight shared with another module",
        "3": "skipped by name",
    }

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    _, cost = logart(Unused(), [normal(20, 8)], iters=5)
    assert [(layer.name, layer.n_inputs, layer.output_error is None) for layer in cost.layers] == [
        ("used", 20, False),
        ("spare", 0, True),
    ]


def test_result_table_figure_and_json():
    _, cost = logart(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), [normal(30, 16)], iters=10)
    assert len(cost.table()) == 2
    assert len(cost.figure().data) == 2
    text = json.loads(json.dumps(cost.to_dict()))
    assert text["total"]["n_weights"] == 160
    _, data_free = logart(nn.Linear(16, 8))
    assert data_free.output_error is None
    assert len(data_free.figure().data) == 1


# ---- bad inputs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: search_log_grid(torch.zeros(2, 2), bits=8), "bits is 8: a logarithmic grid takes 2 to 6"),
        (lambda: search_log_grid(torch.zeros(4)), r"weight has shape \(4,\): pass a matrix"),
        (lambda: search_log_grid(torch.zeros(2, 2, 2)), r"pass a matrix \[out, in\]"),
        (lambda: search_log_grid(torch.zeros(2, 2, dtype=torch.int64)), "weight is torch.int64"),
        (lambda: search_log_grid([[1.0]]), "weight is a list"),
        (lambda: search_log_grid(torch.zeros(2, 2, device="meta")), "meta device"),
        (lambda: search_log_grid(torch.tensor([[1.0, math.inf]])), "1 non-finite entries"),
        (lambda: search_log_grid(torch.ones(2, 2), torch.eye(3)), r"gram has shape \(3, 3\)"),
        (lambda: search_log_grid(torch.ones(2, 2), torch.zeros(2, 2)), "never active"),
        (lambda: search_log_grid(torch.ones(2, 2), torch.full((2, 2), math.nan)), "not finite"),
        (lambda: search_log_grid(torch.ones(2, 2), torch.eye(2), x=torch.eye(2)), "both gram and x"),
        (lambda: search_log_grid(torch.ones(2, 2), x=torch.eye(3)), "pass floating-point inputs"),
        (lambda: search_log_grid(torch.ones(2, 2), base="log3"), "base is 'log3'"),
        (lambda: search_log_grid(torch.ones(2, 2), hardware_terms=5), "hardware_terms is 5"),
        (lambda: search_log_grid(torch.ones(2, 2), shortlist=0), "shortlist is 0"),
        (lambda: one_row(3, 2).quantize(torch.ones(2, 2)), "this grid takes a matrix of 1 rows"),
        (lambda: logart(torch.ones(2, 2), granularity="row"), "granularity is 'row'"),
        (lambda: logart(torch.ones(2, 2), iters=-1), "iters is -1"),
        (lambda: logart(torch.ones(2, 2), lr=0.0), "lr is 0.0"),
        (lambda: logart(torch.ones(2, 2), [torch.ones(2, 2)]), "a bare weight takes gram"),
        (lambda: logart(nn.Linear(2, 2), gram=torch.eye(2)), "gram is for a bare weight"),
        (lambda: logart(nn.Linear(2, 2), []), "calib has no batch"),
        (lambda: logart("model"), "logart was given a str"),
        (lambda: logart(nn.Linear(2, 2), [torch.ones(1, 2)], granularity="block", blocks=["x"]), "no such part"),
        (lambda: LogConv2d(logart_weight(torch.ones(2, 4)), nn.Conv2d(2, 2, 1)), "the convolution's is"),
        (
            lambda: learn_block_rounding(nn.Linear(2, 2), torch.ones(3, 2), torch.ones(2, 2), {}),
            "3 inputs and 2 targets",
        ),
        (
            lambda: learn_block_rounding(nn.Linear(2, 2), torch.ones(2, 2), torch.ones(2, 2), {"x": one_row(3, 2)}),
            "the block has no such layer",
        ),
    ],
)
def test_bad_inputs_are_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_a_model_without_layers_is_refused():
    with pytest.raises(NotApplicable, match="no layer to pack"):
        logart(nn.ReLU())


def test_a_packed_tensor_moves_with_its_grid():
    packed = logart_weight(heavy(4, 32))
    assert isinstance(packed, LogTensor)
    assert torch.equal(packed.to("cpu").dequantize(), packed.dequantize())
