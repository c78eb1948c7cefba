"""BOF4: published and recomputed levels, measured errors, exact invariances, packing, and the 4-bit layer."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from assay.compress import (
    Bof4Result,
    Codebook,
    QTensor,
    QuantizedLinear,
    af4_codebook,
    bof4,
    nf4_codebook,
    quantize,
    quantize_module,
    rtn_codebook,
    solve_codebook,
)
from assay.compress import _bof4 as method
from assay.compress._blockwise import _blocks, _encoder, outlier_threshold
from assay.core.errors import InputError, NotApplicable

EXACT = {"opq": None, "scale_dtype": torch.float32}
ALL_BOOKS = [
    solve_codebook(64),
    solve_codebook(64, signed=False),
    solve_codebook(64, criterion="mae"),
    nf4_codebook(),
    af4_codebook(64),
    af4_codebook(64, zero_aware=True),
    *[rtn_codebook(kind) for kind in ("signed", "absmax", "minmax")],
]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(scope="module")
def gaussian():
    return normal(2**23)


def student(df, seed=0, blocks=20_000):
    draws = np.random.default_rng(seed).standard_t(df, size=blocks * 64)
    return torch.from_numpy(draws / math.sqrt(df / (df - 2))).float()


def block_errors(w, book, block_size=64, opq=None, power=2):
    """Per-block mean error: its average, and the standard error of that average over independent blocks."""
    gap = quantize(w, book, block_size, opq, scale_dtype=torch.float32).dequantize() - w
    blocks = gap.double().abs().pow(power).view(-1, block_size).mean(1)
    return blocks.mean().item(), blocks.std().item() / math.sqrt(blocks.numel())


def assert_measured(w, book, *, mse=None, mae=None, **options):
    """Two samples of the same size agree within four standard errors of their difference, and rounding."""
    for expected, power in ((mse, 2), (mae, 1)):
        if expected is not None:
            mean, error = block_errors(w, book, power=power, **options)
            assert mean == pytest.approx(expected, abs=4 * math.sqrt(2) * error + 1e-6)


# ---- levels ------------------------------------------------------------------------------------------------------


def test_published_levels_bof4s_mse_block_32():
    published = [-0.87328, -0.69074, -0.54370, -0.41737, -0.30389, -0.19860, -0.09816, 0]
    published += [0.09259, 0.18705, 0.28552, 0.39071, 0.50628, 0.63797, 0.79564, 1]
    np.testing.assert_allclose(solve_codebook(32).levels, published, atol=5e-4)


def test_known_levels_bof4s_mse_block_64():
    known = [-0.8568, -0.6689, -0.5232, -0.4004, -0.2911, -0.1901, -0.0939, 0]
    known += [0.0888, 0.1795, 0.2744, 0.3760, 0.4888, 0.6192, 0.7795, 1]
    np.testing.assert_allclose(solve_codebook(64).levels, known, atol=5e-4)


def test_known_levels_bof4_mse_block_64():
    # These were computed from a sample, and levels from 2^23 weights scatter by 1e-3.
    known = [-1, -0.7544, -0.5805, -0.4398, -0.3178, -0.2068, -0.1019]
    np.testing.assert_allclose(solve_codebook(64, signed=False).levels[:7], known, atol=1.5e-3)


def test_published_levels_af4_block_64():
    published = [-0.69441008, -0.51243739, -0.3736951, -0.25607552, -0.14982478, -0.04934812, 0.0]
    published += [0.04273164, 0.12934483, 0.21961274, 0.31675666, 0.42563882, 0.55496234, 0.72424863]
    np.testing.assert_allclose(af4_codebook(64).levels, [-1.0, *published, 1.0], atol=2e-7)


def test_zero_aware_af4_is_better_than_published_at_its_own_criterion():
    w = normal(2**18)
    x = _blocks(w, 64) / _blocks(w, 64).abs().amax(1, keepdim=True)
    aware, published = (
        (quantize(x, book, **EXACT).dequantize() - x).abs().mean()
        for book in (af4_codebook(64, zero_aware=True), af4_codebook(64))
    )
    assert aware < 0.98 * published


@pytest.mark.parametrize("criterion", ["mse", "mae"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("block_size", [2, 5, 64, 512])
def test_integral_and_sample_centroids_agree(block_size, signed, criterion):
    levels = np.array(solve_codebook(block_size, signed, criterion).levels)
    edges = np.concatenate([[-1], (levels[1:] + levels[:-1]) / 2, [1]])
    sample = normal(2**20 // block_size * block_size, seed=3)
    centroids = method._sample_centroids(sample, block_size, signed, criterion)(edges, levels)
    moved = (centroids - levels)[[k for k in range(0 if signed else 1, 15) if k != 7]]
    # A cell holds at least a few thousand weights, spread over a tenth: a standard error below 1e-3.
    assert np.abs(moved).max() < 3e-3


@pytest.mark.parametrize("signed", [True, False])
def test_levels_from_a_sample_come_near_the_integral(gaussian, signed):
    # Lloyd's steps multiply the scatter of a centroid, here 2e-4, by some ten: neighbouring cells move together.
    sampled = solve_codebook(64, signed, "mse", gaussian).levels
    np.testing.assert_allclose(sampled, solve_codebook(64, signed).levels, atol=3e-3)


def test_solved_levels_beat_their_neighbours(gaussian):
    w = gaussian[: 2**20]
    book = solve_codebook(64)
    best, _ = block_errors(w, book)
    for index in (0, 3, 9, 14):
        for step in (-0.02, 0.02):
            moved = list(book.levels)
            moved[index] += step
            assert block_errors(w, Codebook(tuple(moved), "signed"))[0] > best


def test_single_cell_centroid_is_weighted_by_squared_scale():
    # Blocks of two: the second value is the scale, the first normalises to .5 and .7 in the same cell.
    data = torch.tensor([0.5, 1.0, 1.4, 2.0], dtype=torch.float64)
    centroids = method._sample_centroids(data, 2, True, "mse")
    edges = np.array([-1.0, 0.4, 0.8, 1.0])
    assert centroids(edges, np.zeros(3))[1] == pytest.approx((0.5 + 4 * 0.7) / 5) == pytest.approx(0.66)


def test_single_cell_median_is_weighted_by_scale():
    data = torch.tensor([0.5, 1.0, 1.4, 2.0, 0.45, 1.0], dtype=torch.float64)
    centroids = method._sample_centroids(data, 2, True, "mae")
    # Weights 1, 1, 2 at .45, .5, .7: half of the weight is reached at .5.
    assert centroids(np.array([-1.0, 0.4, 0.8, 1.0]), np.zeros(3))[1] == pytest.approx(0.5)


def test_defaults_fix_zero_and_the_ends():
    assert solve_codebook(64, fixed=(0, 1), levels=16) == solve_codebook(64)
    assert solve_codebook(64, False, fixed=(1, -1, 0)) == solve_codebook(64, False)


@pytest.mark.parametrize("criterion", ["mse", "mae"])
def test_signed_levels_with_both_ends_fixed_are_those_of_unsigned_blocks(criterion):
    # Given the scale, the other weights of a block follow the same law, and the largest one moves no level.
    both = solve_codebook(64, True, criterion, fixed=(-1, 0, 1))
    assert both.levels == solve_codebook(64, False, criterion).levels
    assert both.scaling == "signed"


def test_one_free_level_between_fixed_ends_is_the_mean_of_its_cell():
    # Between -1 and 1 the free level's cell is symmetric about zero.
    assert solve_codebook(2, False, fixed=(-1, 1), levels=3).levels == pytest.approx((-1, 0, 1), abs=1e-8)
    # Two weights a block: the smaller one, divided by the larger, with its share of the cell below (free + 1) / 2.
    free = solve_codebook(2, True, fixed=(1,), levels=2).levels[0]
    generator = np.random.default_rng(0)
    pairs = np.abs(generator.standard_normal((2**21, 2)))
    scale, x = pairs.max(1), pairs.min(1) / pairs.max(1) * generator.choice([-1, 1], 2**21)
    inside = x < (free + 1) / 2
    mean = np.average(x[inside], weights=scale[inside] ** 2)
    assert free == pytest.approx(mean, abs=2e-3)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("fixed", "levels"), [(None, 4), (None, 8), ((-1, 1), 5), ((-1, -0.5, 0, 1), 7)])
def test_any_number_of_levels_is_stationary(fixed, levels, signed):
    book = solve_codebook(64, signed, fixed=fixed, levels=levels)
    assert len(book.levels) == levels
    held = set(fixed or ((0, 1) if signed else (-1, 0, 1)))
    assert held <= set(book.levels)
    at = np.array(book.levels)
    edges = np.concatenate([[-1], (at[1:] + at[:-1]) / 2, [1]])
    centroids = method._sample_centroids(normal(2**20, seed=3), 64, signed, "mse")(edges, at)
    free = [k for k, v in enumerate(book.levels) if v not in held]
    assert np.abs(centroids - at)[free].max() < 3e-3


def test_more_levels_cost_less(gaussian):
    w = gaussian[: 2**18]
    errors = [block_errors(w, solve_codebook(64, levels=n))[0] for n in (2, 3, 4, 6, 8, 12, 16)]
    assert errors == sorted(errors, reverse=True)
    # Twice as many levels make about a quarter of the error.
    assert errors[-1] / errors[-3] == pytest.approx(0.25, abs=0.05)


def test_few_levels_fit_given_weights_too():
    w = student(5, seed=1)
    fitted = solve_codebook(64, data=w, levels=6)
    assert len(fitted.levels) == 6
    assert block_errors(w, fitted)[0] < block_errors(w, solve_codebook(64, levels=6))[0]
    packed, cost = bof4(w, codebook=fitted, opq=None)
    assert cost.codebook.name == "BOF4-S (MSE, from data, 6 levels)"
    assert packed.bits_per_weight == pytest.approx(4.25)


def test_default_solve_is_deterministic():
    method._gaussian_levels.cache_clear()
    first = solve_codebook(64)
    method._gaussian_levels.cache_clear()
    assert solve_codebook(64) == first


def test_fitted_levels_beat_gaussian_levels_on_heavy_tails():
    w, fresh = student(5, seed=1), student(5, seed=2)
    fitted = solve_codebook(64, data=w)
    assert block_errors(fresh, fitted)[0] < 0.95 * block_errors(fresh, solve_codebook(64))[0]


# ---- measured errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("book", "mse", "mae"),
    [
        (nf4_codebook(), 0.008454, 0.072765),
        (solve_codebook(64, False), 0.007989, 0.073840),
        (solve_codebook(64, False, "mae"), 0.008386, 0.072747),
        (solve_codebook(64), 0.007349, 0.070840),
        (solve_codebook(64, True, "mae"), 0.007806, 0.069728),
    ],
    ids=lambda v: v.name if isinstance(v, Codebook) else "",
)
def test_gaussian_error_block_64(gaussian, book, mse, mae):
    assert_measured(gaussian, book, mse=mse, mae=mae)


@pytest.mark.parametrize(
    ("book", "mse", "mae"),
    [
        (nf4_codebook(), 0.007631, 0.067771),
        (solve_codebook(32, False), 0.006870, None),
        (solve_codebook(32), 0.006336, 0.065399),
    ],
    ids=lambda v: v.name if isinstance(v, Codebook) else "",
)
def test_gaussian_error_block_32(gaussian, book, mse, mae):
    assert_measured(gaussian, book, mse=mse, mae=mae, block_size=32)


def test_gaussian_gain_over_nf4(gaussian):
    nf4, _ = block_errors(gaussian, nf4_codebook())
    assert block_errors(gaussian, solve_codebook(64))[0] / nf4 == pytest.approx(0.87, abs=0.005)
    assert block_errors(gaussian, solve_codebook(64, False))[0] / nf4 == pytest.approx(0.945, abs=0.005)


def test_paper_ratios_on_llama_hold_for_gaussian_weights(gaussian):
    # Llama-3.1-8B in the paper: BOF4 / NF4 = 1.566 / 1.637, BOF4-S / NF4 = 1.441 / 1.637 (weight MSE).
    nf4, _ = block_errors(gaussian, nf4_codebook())
    assert block_errors(gaussian, solve_codebook(64, False))[0] / nf4 == pytest.approx(1.566 / 1.637, abs=0.02)
    assert block_errors(gaussian, solve_codebook(64))[0] / nf4 == pytest.approx(1.441 / 1.637, abs=0.02)


def test_gaussian_outliers(gaussian):
    q = quantize(gaussian, solve_codebook(64), opq=0.95)
    touched = (q.outlier_index // 64).unique().numel() / q.scales.numel()
    assert touched == pytest.approx(0.035, abs=0.002)
    assert_measured(gaussian, solve_codebook(64), mse=0.00720, opq=0.95)


@pytest.mark.parametrize(
    ("df", "nf4", "unsigned", "signed", "outliers_apart", "bits"),
    [(5, 0.01093, 0.01183, 0.01088, 0.00722, 4.78), (3, 0.01485, 0.01700, 0.01568, 0.00597, 5.21)],
)
def test_heavy_tails(df, nf4, unsigned, signed, outliers_apart, bits):
    w = student(df)
    assert_measured(w, nf4_codebook(), mse=nf4)
    assert_measured(w, solve_codebook(64, False), mse=unsigned)
    assert_measured(w, solve_codebook(64), mse=signed)
    assert_measured(w, solve_codebook(64), mse=outliers_apart, opq=0.95)
    assert quantize(w, solve_codebook(64), opq=0.95).bits_per_weight == pytest.approx(bits, abs=0.02)


@pytest.mark.parametrize("df", [3, 5])
def test_bof4_loses_to_nf4_on_heavy_tails_without_outliers_apart(df):
    w = student(df)
    assert block_errors(w, solve_codebook(64, False))[0] > 1.05 * block_errors(w, nf4_codebook())[0]


def test_bfloat16_scales_hardly_change_the_error(gaussian):
    w = gaussian[: 2**20]
    stored, exact = (bof4(w, opq=None, scale_dtype=dtype)[1].mse for dtype in (torch.bfloat16, torch.float32))
    assert stored == pytest.approx(exact, rel=5e-4)


# ---- outlier threshold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "threshold"), [(64, 3.3524), (32, 3.1556), (128, 3.5397)])
def test_known_outlier_threshold(block_size, threshold):
    tau = outlier_threshold(block_size, 0.95)
    assert tau == pytest.approx(threshold, abs=5e-5)
    assert math.erf(tau / math.sqrt(2)) ** block_size == pytest.approx(0.95, abs=1e-12)


def test_quantile_one_finds_no_outlier():
    w = student(3, blocks=500)
    assert quantize(w, solve_codebook(64), opq=1.0).n_outliers == 0
    assert quantize(w, solve_codebook(64), opq=1.0 - 1e-300).n_outliers == 0


def test_outliers_are_kept_in_bfloat16_and_leave_the_scale():
    w = normal(64) * 0.1
    w[17] = -5.0
    q = quantize(w, solve_codebook(64))
    assert q.outlier_index.tolist() == [17]
    assert q.dequantize()[17] == -5.0
    assert q.scales.abs().item() < 1
    assert q.bits_per_weight == 4 + 16 / 64 + 80 / 64


def test_outliers_use_the_sample_deviation():
    # Chosen so that the value lies between the thresholds of ddof 0 and 1.
    w = torch.tensor([1.0, -1.0] * 31 + [0.0])
    block = torch.cat([w, torch.zeros(1)])
    tau = outlier_threshold(64, 0.95)

    def ratio(v):
        block[-1] = v
        return v / block.std(correction=1).item(), v / block.std(correction=0).item()

    value = next(v for v in np.arange(3, 6, 0.005) if ratio(v)[1] > tau)
    assert ratio(value)[0] < tau < ratio(value)[1]
    assert quantize(block, solve_codebook(64)).n_outliers == 0


@pytest.mark.parametrize("w", [torch.full((128,), 0.3), torch.full((4,), 2.0), torch.linspace(1, 1.001, 128)])
def test_uncentred_blocks_keep_their_weights(w):
    assert quantize(w, solve_codebook(64)).n_outliers == 0


def test_padding_does_not_count_in_the_deviation():
    w = normal(64 + 40)
    tau = outlier_threshold(64, 0.95)

    def ratios(v):
        w[70] = v
        return v / w[64:].std().item(), v / torch.cat([w[64:], torch.zeros(24)]).std().item()

    value = next(v for v in np.arange(2, 9, 0.01) if ratios(v)[1] > tau)
    assert ratios(value)[0] < tau
    assert quantize(w, solve_codebook(64)).n_outliers == 0
    value = next(v for v in np.arange(2, 9, 0.01) if ratios(v)[0] > tau)
    w[70] = value
    assert quantize(w, solve_codebook(64)).outlier_index.tolist() == [70]


def test_a_lone_weight_in_the_last_block_is_no_outlier():
    w = torch.cat([normal(64), torch.tensor([50.0])])
    q = quantize(w, solve_codebook(64))
    assert q.n_outliers == 0
    assert q.dequantize()[-1] == 50


# ---- invariances -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("book", ALL_BOOKS, ids=lambda b: b.name)
@pytest.mark.parametrize("opq", [None, 0.95])
def test_scaling_by_powers_of_two_is_exact(book, opq):
    w = normal(3, 200)
    base = quantize(w, book, opq=opq)
    scaled = quantize(w * 8, book, opq=opq)
    assert torch.equal(scaled.codes, base.codes)
    assert torch.equal(scaled.dequantize(), base.dequantize() * 8)


@given(a=st.floats(1e-3, 1e3), seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_scaling_is_equivariant(a, seed):
    w = normal(256, seed=seed, dtype=torch.float64)
    for book in (solve_codebook(64), solve_codebook(64, False)):
        got = quantize(w * a, book, **EXACT).dequantize()
        torch.testing.assert_close(got, quantize(w, book, **EXACT).dequantize() * a, rtol=2e-6, atol=0)


@pytest.mark.parametrize("opq", [None, 0.95])
def test_negation_is_exact_for_signed_blocks(opq):
    # bfloat16 weights: many blocks have both signs of the same largest magnitude.
    w = normal(2**14, dtype=torch.bfloat16)
    plus, minus = quantize(w, solve_codebook(64), opq=opq), quantize(-w, solve_codebook(64), opq=opq)
    blocks = w.view(-1, 64).float()
    assert opq is not None or (blocks.amax(1) == -blocks.amin(1)).any()
    assert torch.equal(plus.codes, minus.codes)
    assert torch.equal(plus.dequantize(), -minus.dequantize())


def test_first_of_tied_weights_gives_the_scale():
    w = torch.tensor([0.1, -0.5, 0.5, 0.2])
    assert quantize(w, solve_codebook(4), 4, **EXACT).scales.item() == -0.5


@pytest.mark.parametrize("book", [b for b in ALL_BOOKS if b.scaling != "minmax"], ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_maximum_is_exact(book, dtype):
    w = normal(2**12, dtype=dtype)
    # bfloat16 weights need no wider scale.
    scale_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    decoded = quantize(w, book, opq=None, scale_dtype=scale_dtype).dequantize().view(-1, 64)
    at = w.view(-1, 64).abs().argmax(1, keepdim=True)
    assert torch.equal(decoded.gather(1, at), w.view(-1, 64).gather(1, at))


@pytest.mark.parametrize("book", [b for b in ALL_BOOKS if b.scaling != "minmax"], ids=lambda b: b.name)
def test_block_of_levels_decodes_exactly(book):
    blocks = torch.tensor(book.levels).repeat(5)[:64].repeat(3)
    scale = torch.tensor([0.5, 2.0, 1.0]).repeat_interleave(64)
    assert torch.equal(quantize(blocks * scale, book, opq=None).dequantize(), blocks * scale)


@pytest.mark.parametrize("book", ALL_BOOKS, ids=lambda b: b.name)
def test_zero_blocks_decode_to_zero(book):
    w = torch.cat([torch.zeros(64), normal(64), torch.zeros(7)])
    q = quantize(w, book)
    assert torch.equal(q.dequantize()[:64], torch.zeros(64))
    assert torch.equal(q.dequantize()[128:], torch.zeros(7))
    if book.scaling != "minmax":
        assert set(q.codes[:32].tolist()) == {book.levels.index(0.0) * 17}


@given(
    n=st.integers(1, 700),
    block_size=st.integers(2, 130),
    which=st.integers(0, len(ALL_BOOKS) - 1),
    opq=st.sampled_from([None, 0.5, 0.95]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_every_weight_takes_its_nearest_level(n, block_size, which, opq, seed):
    w = torch.from_numpy(np.random.default_rng(seed).standard_t(3, n)).float()
    book = ALL_BOOKS[which]
    q = quantize(w, book, block_size, opq, scale_dtype=torch.float32)
    decoded = q.dequantize()
    kept = torch.ones(n, dtype=torch.bool)
    kept[q.outlier_index] = False
    assert torch.equal(decoded[~kept], w[~kept].bfloat16().float())
    scale = q.scales.repeat_interleave(block_size)[:n]
    offset = torch.zeros(n) if q.offsets is None else q.offsets.repeat_interleave(block_size)[:n]
    all_levels = offset[:, None] + scale[:, None] * q.levels
    best = (all_levels - w[:, None]).abs().amin(1)
    torch.testing.assert_close((decoded - w).abs()[kept], best[kept], rtol=1e-4, atol=1e-6 * float(w.abs().max()))
    start, stop = sorted(np.random.default_rng(seed + 1).integers(0, n + 1, 2))
    if start < stop:
        assert torch.equal(q.decode(int(start), int(stop)), decoded[start:stop])


def test_chunks_do_not_show(monkeypatch):
    w = student(5, blocks=200)[: 64 * 199 + 13]
    whole = quantize(w, solve_codebook(48), 48)
    monkeypatch.setattr("assay.compress._blockwise._CPU_CHUNK", 500)
    parts = quantize(w, solve_codebook(48), 48)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.outlier_index, whole.outlier_index)
    assert torch.equal(parts.dequantize(), whole.dequantize())


@pytest.mark.parametrize("gap", [0.09, 1e-3, 1e-6])
def test_encoding_equals_a_binary_search(gap):
    levels = (-1.0, -0.5, -0.5 + gap, -0.5 + 2 * gap, 0.0, 0.3, 1.0)
    book = Codebook(levels, "absmax")
    bounds = torch.tensor(book.boundaries)
    x = torch.cat([normal(5000).clamp(-1, 1), bounds, bounds.nextafter(torch.tensor(2.0)), torch.tensor([-1.01, 1.01])])
    got = _encoder(book, torch.float32, x.device)(x)
    assert torch.equal(got, torch.bucketize(x, bounds).to(torch.uint8))


# ---- types, layouts, sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_types(dtype):
    w = normal(32, 96).to(dtype)
    q = quantize(w, solve_codebook(64))
    assert q.dequantize().dtype == dtype
    assert q.dequantize(torch.float16).dtype == torch.float16
    error = (q.dequantize().double() - w.double()).square().sum() / w.double().square().sum()
    assert error == pytest.approx(0.0072, abs=0.001)


def test_non_contiguous_weights_are_read_in_their_own_order():
    w = normal(70, 64).T
    assert torch.equal(quantize(w, solve_codebook(64)).codes, quantize(w.contiguous(), solve_codebook(64)).codes)


def test_moving_to_another_device():
    q = quantize(student(3, blocks=20), rtn_codebook("minmax"))
    before = q.dequantize()
    assert q.to("meta").codes.device.type == "meta"
    assert torch.equal(q.to("cpu").dequantize(), before)


def test_input_is_left_alone():
    w = student(3, blocks=20)
    before = w.clone()
    quantize(w, solve_codebook(64))
    assert torch.equal(w, before)


@pytest.mark.parametrize(("block_size", "bits"), [(64, 4.25), (32, 4.5), (128, 4.125)])
def test_bits_per_weight(block_size, bits):
    assert quantize(normal(2**12), solve_codebook(block_size), block_size, None).bits_per_weight == bits


def test_memory_of_a_layer_is_its_bits():
    layer = quantize_module(nn.Linear(512, 512, bias=False))
    stored = sum(b.numel() * b.element_size() for b in layer.buffers())
    assert stored / 512**2 == pytest.approx(layer.packed.bits_per_weight / 8, rel=1e-3)
    assert quantize_module(nn.Linear(512, 512), opq=None).packed.bits_per_weight / 8 == pytest.approx(0.53, abs=0.005)


# ---- layer and model ---------------------------------------------------------------------------------------------


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, 48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48, bias=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 40])
def test_layer_computes_with_decoded_weights(dtype, rows):
    layer = nn.Linear(100, 30).to(dtype)
    packed = quantize_module(copy.deepcopy(layer))
    x = normal(rows, 100).to(dtype)
    expected = nn.functional.linear(x, packed.packed.dequantize(dtype), layer.bias)
    got = packed(x)
    assert got.dtype == dtype
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(100,), (2, 3, 100), (0, 100)])
def test_layer_takes_any_leading_shape(shape):
    layer = quantize_module(nn.Linear(100, 30))
    assert layer(torch.ones(shape)).shape == (*shape[:-1], 30)


def test_gradients_reach_the_input_only(monkeypatch):
    monkeypatch.setattr("assay.compress._blockwise._CPU_CHUNK", 300)
    layer = quantize_module(nn.Linear(100, 30).double())
    x = normal(5, 100, dtype=torch.float64).requires_grad_()
    layer(x).square().sum().backward()
    weight = layer.packed.dequantize()
    expected = 2 * (x.detach() @ weight.T + layer.bias) @ weight
    torch.testing.assert_close(x.grad, expected, rtol=1e-6, atol=1e-6)
    assert not any(p.requires_grad for p in layer.parameters())


def test_backward_keeps_no_decoded_weight():
    layer = quantize_module(nn.Linear(256, 256))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.ones(9, 256, requires_grad=True)).sum()
    assert all(t.numel() < 256 * 256 for t in kept)


def test_autocast():
    layer = quantize_module(nn.Linear(64, 8))
    x = torch.ones(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_casting_a_model_leaves_the_packed_weight_as_it_is():
    layer = quantize_module(nn.Linear(64, 8), scale_dtype=torch.float32)
    before = layer.packed.dequantize(torch.float32)
    layer.half()
    assert torch.equal(layer.packed.dequantize(torch.float32), before)
    assert layer.weight.dtype == torch.float16
    assert layer.bias.dtype == torch.float16


def test_model_is_rewritten_in_place_and_reported():
    model = small_model()
    before = copy.deepcopy(model)
    rewritten, result = bof4(model)
    assert rewritten is model
    assert [type(m).__name__ for m in model] == ["Embedding", "QuantizedLinear", "GELU", "QuantizedLinear"]
    assert [layer.name for layer in result.layers] == ["1", "3"]
    for layer, name in zip(result.layers, "13", strict=True):
        gap = model.get_submodule(name).weight - before.get_submodule(name).weight
        assert layer.mse == pytest.approx(gap.double().square().mean().item(), rel=1e-6)
        assert layer.mae == pytest.approx(gap.double().abs().mean().item(), rel=1e-6)
    energy = sum(before.get_submodule(n).weight.double().square().sum().item() for n in "13")
    assert result.relative_error == pytest.approx(result.mse * result.n_weights / energy, rel=1e-6)
    assert result.kept_parameters == 11 * 48 + 96
    tokens = torch.arange(11)
    assert not torch.equal(model(tokens), before(tokens))
    torch.testing.assert_close(model(tokens), before(tokens), rtol=0, atol=0.1)


def test_quantize_module_does_the_same_as_bof4():
    one, _ = bof4(small_model())
    other = quantize_module(small_model())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_an_error_leaves_the_model_as_it_was():
    model = small_model()
    with torch.no_grad():
        model[3].weight[0, 0] = math.nan
    with pytest.raises(InputError, match="layer 3: weight tensor has 1 non-finite entries"):
        bof4(model)
    assert type(model[1]) is nn.Linear


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.body = nn.Linear(32, 32)
        self.again = self.body
        self.output = nn.Linear(32, 20, bias=False)
        self.output.weight = self.embed.weight
        self.lm_head = nn.Linear(32, 20)


def test_tied_and_skipped_weights_are_left_and_shared_layers_stay_shared():
    model, result = bof4(Tied())
    assert model.output.weight is model.embed.weight
    assert type(model.lm_head) is nn.Linear
    assert isinstance(model.body, QuantizedLinear)
    assert model.again is model.body
    assert result.left == {"output": "weight shared with another module", "lm_head": "skipped by name"}


@pytest.mark.parametrize("skip", [("inner",), ("inner.0",), ("0",), ("outer.inner",)])
def test_skip_by_name(skip):
    model = nn.ModuleDict({"outer": nn.ModuleDict({"inner": nn.Sequential(nn.Linear(8, 8))}), "x": nn.Linear(8, 8)})
    bof4(model, skip=("inner.0",) if skip == ("inner",) else skip)
    assert type(model["outer"]["inner"][0]) is nn.Linear
    assert isinstance(model["x"], QuantizedLinear)


def test_subclasses_of_linear_are_left():
    attention = nn.MultiheadAttention(16, 2)
    with pytest.raises(NotApplicable, match="no linear layer"):
        bof4(attention)


def test_state_dict_round_trip_with_another_number_of_outliers(tmp_path):
    from safetensors.torch import load_file, save_file

    model, _ = bof4(small_model())
    with torch.no_grad():
        spiky = small_model(1)
        spiky[1].weight.view(-1)[::64] = 3.0
    other, result = bof4(spiky)
    assert result.n_outliers > 0
    save_file({k: v.contiguous() for k, v in other.state_dict().items()}, tmp_path / "packed.safetensors")
    model.load_state_dict(load_file(tmp_path / "packed.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert torch.equal(model(torch.arange(11)), other(torch.arange(11)))


def test_state_dict_keeps_the_type_of_the_scales():
    wide = quantize_module(small_model(), scale_dtype=torch.float32)
    narrow = quantize_module(small_model(1))
    narrow.load_state_dict(wide.state_dict())
    assert narrow[1].scales.dtype == torch.float32


def test_deepcopy():
    layer = quantize_module(nn.Linear(64, 8))
    assert torch.equal(copy.deepcopy(layer)(torch.ones(1, 64)), layer(torch.ones(1, 64)))


def test_weight_refuses_assignment():
    layer = quantize_module(nn.Linear(64, 8))
    with pytest.raises(NotApplicable, match="cannot be assigned"):
        layer.weight.data += 1
    with pytest.raises(NotApplicable, match="cannot be assigned"):
        layer.weight.data = torch.zeros(8, 64)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, n_positions=16)).eval()


def test_transformers_conv1d():
    model = gpt2()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    tokens = torch.arange(8)[None]
    before = model(tokens).logits
    source = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    model, result = bof4(model, opq=None, scale_dtype=torch.float32)
    assert {layer.name.rpartition(".")[2] for layer in result.layers} == {"c_attn", "c_proj", "c_fc"}
    layer = model.transformer.h[0].attn.c_attn
    assert (layer.in_features, layer.out_features) == (32, 96)
    expected = quantize(source.T, solve_codebook(64), **EXACT).dequantize()
    assert torch.equal(torch.Tensor(layer.weight.detach()), expected)
    after = model(tokens).logits
    assert 0 < (after - before).square().mean() < 0.2 * before.var()


def test_peft_lora_trains_on_top_and_merging_is_refused():
    peft = pytest.importorskip("peft")
    model = quantize_module(gpt2())
    codes = model.transformer.h[0].attn.c_attn.codes.clone()
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=False))
    tokens = torch.arange(8)[None]
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(model.base_model.model.transformer.h[0].attn.c_attn.base_layer.codes, codes)
    with pytest.raises(NotApplicable, match="cannot be assigned"):
        model.merge_adapter()


def test_real_checkpoint(shared_data):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(shared_data("stories260k") / "hf")
    weights = torch.cat([p.detach().reshape(-1) for n, p in model.named_parameters() if "proj" in n])
    errors = {book.name: bof4(weights, codebook=book, opq=None)[1].relative_error for book in ALL_BOOKS}
    model, result = bof4(model, opq=None)
    assert result.relative_error == pytest.approx(errors["BOF4-S (MSE)"], rel=0.01)
    assert errors["BOF4-S (MSE)"] < errors["NF4"]


def test_signed_levels_beat_nf4_on_a_trained_like_matrix():
    # The built-in twin of the test on a real checkpoint: rows of differing scale, as training leaves them.
    w = normal(256, 256) * torch.linspace(0.5, 2, 256)[:, None]
    assert bof4(w, opq=None)[1].relative_error < 0.9 * bof4(w, codebook=nf4_codebook(), opq=None)[1].relative_error


# ---- result ------------------------------------------------------------------------------------------------------


def test_result_table_figure_and_json():
    _, result = bof4(small_model())
    assert isinstance(result, Bof4Result)
    assert len(result.table()) == 3
    assert "BOF4-S (MSE), blocks of 64, OPQ 0.95" in str(result.table())
    assert len(result.figure().data[0].x) == 2
    read = json.loads(json.dumps(result.to_dict()))
    assert read["total"]["bits_per_weight"] == result.bits_per_weight
    assert read["codebook"]["levels"] == list(solve_codebook(64).levels)


def test_all_zero_weight_has_no_relative_error():
    assert bof4(torch.zeros(128))[1].relative_error == 0


def test_tensor_gives_a_packed_tensor():
    packed, result = bof4(normal(10, 20))
    assert isinstance(packed, QTensor)
    assert packed.dequantize().shape == (10, 20)
    assert result.layers[0].name == "weight"


# ---- refusals ----------------------------------------------------------------------------------------------------


def with_bad_entries():
    w = normal(100)
    w[3], w[5] = math.nan, math.inf
    return w


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(with_bad_entries(), nf4_codebook()), "weight tensor has 2 non-finite entries"),
        (lambda: quantize(torch.zeros(0), nf4_codebook()), "is empty"),
        (lambda: quantize(torch.ones(4, dtype=torch.int32), nf4_codebook()), "pass floating-point weights"),
        (lambda: quantize(torch.ones(4, device="meta"), nf4_codebook()), "meta device"),
        (lambda: quantize([1.0], nf4_codebook()), "pass a torch tensor"),
        (lambda: quantize(torch.ones(4), nf4_codebook(), block_size=1), "block_size is 1"),
        (lambda: quantize(torch.ones(4), nf4_codebook(), block_size=6.4), "block_size is 6.4"),
        (lambda: quantize(torch.ones(4), nf4_codebook(), opq=0.0), "opq is 0.0"),
        (lambda: quantize(torch.ones(4), nf4_codebook(), opq=1.5), "opq is 1.5"),
        (lambda: quantize(torch.ones(4), nf4_codebook(), scale_dtype=torch.int8), "scale_dtype is torch.int8"),
        (
            lambda: quantize(torch.full((4,), 1e5), nf4_codebook(), scale_dtype=torch.float16),
            "scale exceeds dtype range",
        ),
        (
            lambda: quantize(torch.full((4,), 1e-12), nf4_codebook(), scale_dtype=torch.float16),
            "scale exceeds dtype range",
        ),
        (lambda: solve_codebook(1), "block_size is 1"),
        (lambda: solve_codebook(64, criterion="rmse"), "criterion is 'rmse'"),
        (lambda: solve_codebook(64, data="laplace"), "data is 'laplace'"),
        (lambda: solve_codebook(64, levels=17), "levels is 17: 4 bits hold a whole number from 2 to 16"),
        (lambda: solve_codebook(64, levels=8.0), "levels is 8.0"),
        (lambda: solve_codebook(64, fixed=(0, 2)), "give different levels from -1 to 1, among them 1, where"),
        (lambda: solve_codebook(64, False, fixed=(0, 1)), "among them -1 and 1"),
        (lambda: solve_codebook(64, fixed=(0, 0, 1)), "give different levels"),
        (lambda: solve_codebook(64, fixed=(math.nan, 1)), "give different levels"),
        (lambda: solve_codebook(64, fixed=5), "fixed is 5: give different levels"),
        (lambda: solve_codebook(64, fixed=(-1, 0, 1), levels=2), "fixed has 3 levels and levels is 2"),
        (lambda: solve_codebook(64, data=torch.zeros(128)), "no weight other than zero"),
        (lambda: solve_codebook(64, data=torch.zeros(0)), "no weight other than zero"),
        (lambda: solve_codebook(64, data=with_bad_entries()), "data has 2 non-finite entries"),
        (lambda: solve_codebook(64, data=torch.ones(4, dtype=torch.int64)), "pass floating-point weights"),
        (lambda: rtn_codebook("odd"), "kind of rounding is 'odd'"),
        (lambda: af4_codebook(0), "block_size is 0"),
        (lambda: Codebook((0.0, 1.0, 0.5), "absmax"), "do not ascend"),
        (lambda: Codebook(tuple(range(17)), "absmax"), "17 levels"),
        (lambda: Codebook((0.0, math.nan), "absmax"), "not finite"),
        (lambda: Codebook((0.0, 1.0), "mean"), "scaling is 'mean'"),
        (lambda: bof4([1.0]), "pass a tensor or a torch module"),
        (lambda: bof4(torch.ones(4), codebook=5), "codebook is int: pass a Codebook, such as nf4_codebook"),
        (lambda: bof4(torch.ones(4), codebook=0), "codebook is int"),
        (lambda: bof4(nn.Linear(4, 4), codebook=[0.0, 1.0]), "codebook is list"),
        (lambda: quantize_module(nn.Linear(4, 4), "nf4"), "codebook is str"),
        (lambda: bof4(torch.ones(4, dtype=torch.int8)), "weight tensor is torch.int8: pass floating-point weights"),
        (lambda: QuantizedLinear(quantize(torch.ones(4), nf4_codebook())), "takes a matrix"),
        (lambda: QuantizedLinear(quantize(torch.ones(4, 4), nf4_codebook()), torch.ones(3)), "bias has shape"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        call()


def test_large_finite_weights_are_not_taken_for_infinite():
    w = torch.full((64,), 3e38)
    assert quantize(w, solve_codebook(64), opq=None, scale_dtype=torch.float32).dequantize()[0] == w[0]


def test_no_linear_layer():
    with pytest.raises(NotApplicable, match="no linear layer to quantise"):
        bof4(nn.Sequential(nn.Conv2d(3, 3, 1)))
