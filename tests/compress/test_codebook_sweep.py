"""Codes chosen knowing the inputs: on the same levels, with a smaller error."""

import pytest
import torch

from assay.compress import Codebook, Curvature, nf4_codebook, output_error, quantize, solve_codebook
from assay.compress._codebook_sweep import _CodebookGrid, codebook_sweep
from assay.core.errors import InputError


def draw(seed, out=16, n_in=48, rows=256, rank=8):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, rank, generator=g) @ torch.randn(rank, n_in, generator=g) / rank**0.5
    x += 0.3 * torch.randn(rows, n_in, generator=g)
    return torch.randn(out, n_in, generator=g) / n_in**0.5, x.T @ x / rows


BOOKS = {"signed": lambda: solve_codebook(16), "absmax": nf4_codebook}
each = pytest.mark.parametrize("book", BOOKS.values(), ids=BOOKS)


@each
@pytest.mark.parametrize("seed", range(5))
def test_the_output_error_falls(book, seed):
    w, H = draw(seed)
    packed = quantize(w, book(), 16, opq=None)
    swept = codebook_sweep(w, packed, Curvature.of(H))
    assert output_error(w, swept.dequantize(), H) < 0.7 * output_error(w, packed.dequantize(), H)


@each
def test_only_the_codes_change(book):
    w, H = draw(0)
    packed = quantize(w, book(), 16, opq=None)
    swept = codebook_sweep(w, packed, Curvature.of(H))
    assert torch.equal(swept.scales, packed.scales)
    assert torch.equal(swept.levels, packed.levels)
    assert swept.bits_per_weight == packed.bits_per_weight
    assert not torch.equal(swept.codes, packed.codes)


@each
def test_independent_inputs_leave_the_codes(book):
    w, _ = draw(1)
    packed = quantize(w, book(), 16, opq=None)
    swept = codebook_sweep(w, packed, Curvature.of(2.0 * torch.eye(48)))
    assert torch.equal(swept.dequantize(), packed.dequantize())


@each
def test_what_was_found_is_what_is_stored(book):
    w, H = draw(2)
    packed = quantize(w, book(), 16, opq=None)
    swept = codebook_sweep(w, packed, Curvature.of(H))
    grid = _CodebookGrid.of(packed)
    dense = swept.dequantize()
    assert torch.equal(grid.nearest(dense), dense)


def test_coordinate_descent_never_costs():
    for seed in range(5):
        w, H = draw(seed)
        packed, curvature = quantize(w, nf4_codebook(), 16, opq=None), Curvature.of(H)
        errors = [
            output_error(w, codebook_sweep(w, packed, curvature, rounds=rounds).dequantize(), curvature.H)
            for rounds in (0, 1, 3)
        ]
        assert errors[0] >= errors[1] * (1 - 1e-6) >= errors[2] * (1 - 1e-5)


def test_outliers_stay_outliers_and_make_good_too():
    w, H = draw(3)
    w[:, 5] *= 30
    packed = quantize(w, solve_codebook(16), 16, opq=0.9)
    assert packed.n_outliers
    swept = codebook_sweep(w, packed, Curvature.of(H))
    assert torch.equal(swept.outlier_index, packed.outlier_index)
    assert output_error(w, swept.dequantize(), H) < output_error(w, packed.dequantize(), H)


@pytest.mark.parametrize("shape", [(3, 7), (5, 48), (1, 1)])
def test_an_odd_number_of_weights_and_blocks_across_rows(shape):
    g = torch.Generator().manual_seed(4)
    w, x = torch.randn(shape, generator=g), torch.randn(64, shape[1], generator=g)
    packed = quantize(w, nf4_codebook(), 4, opq=None)
    swept = codebook_sweep(w, packed, Curvature.of(x.T @ x))
    assert swept.codes.shape == packed.codes.shape
    assert swept.dequantize().shape == shape


def test_a_block_of_zeros_stays_zero():
    w, H = draw(5)
    w[:, :16] = 0
    packed = quantize(w, nf4_codebook(), 16, opq=None)
    assert (codebook_sweep(w, packed, Curvature.of(H)).dequantize()[:, :16] == 0).all()


@pytest.mark.parametrize("hessian", [torch.zeros(48, 48), torch.ones(48, 48)], ids=["zero", "rank one"])
def test_a_singular_hessian(hessian):
    w, _ = draw(6)
    packed = quantize(w, nf4_codebook(), 16, opq=None)
    assert torch.isfinite(codebook_sweep(w, packed, Curvature.of(hessian)).dequantize()).all()


def test_a_codebook_with_offsets_is_refused():
    w, H = draw(7)
    packed = quantize(w, Codebook(tuple(i / 15 for i in range(16)), "minmax"), 16, opq=None)
    with pytest.raises(InputError, match="minmax"):
        codebook_sweep(w, packed, Curvature.of(H))
