"""Codes go in and come out as they were, in as few bytes as there can be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.compress._packing import pack, packed_width, unpack
from assay.core.errors import InputError


@given(bits=st.integers(1, 8), n=st.integers(0, 40), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_round_trip(bits, n, rows, seed):
    codes = torch.randint(0, 2**bits, (rows, n), generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, packed_width(n, bits))
    assert torch.equal(unpack(packed, bits, n).long(), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_layout_is_one_long_number_from_the_lowest_bit_up(bits):
    codes = torch.randint(0, 2**bits, (13,), generator=torch.Generator().manual_seed(bits))
    number = sum(c << (bits * i) for i, c in enumerate(codes.tolist()))
    assert bytes(pack(codes, bits).tolist()) == number.to_bytes(packed_width(13, bits), "little")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_integer_type_and_layout(dtype):
    codes = torch.randint(0, 32, (6, 10), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(pack(codes.T, 5), pack(codes.T.contiguous(), 5))
    assert torch.equal(unpack(pack(codes.T, 5), 5, 6), codes.T.to(torch.uint8))


def test_leading_dimensions():
    codes = torch.arange(24).reshape(2, 3, 4)
    assert pack(codes, 5).shape == (2, 3, 3)
    assert torch.equal(unpack(pack(codes, 5), 5, 4).long(), codes)


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_out_of_range(bits):
    with pytest.raises(InputError, match=f"bits is {bits}: codes have 1 to 8 bits"):
        pack(torch.zeros(2, dtype=torch.int64), bits)
    with pytest.raises(InputError, match=f"bits is {bits}"):
        unpack(torch.zeros(2, dtype=torch.uint8), bits, 2)


@pytest.mark.parametrize("codes", [[0, 8], [-1, 2]])
def test_a_code_that_does_not_fit(codes):
    with pytest.raises(InputError, match="3 bits hold 0 to 7"):
        pack(torch.tensor(codes), 3)


def test_a_row_of_the_wrong_length():
    with pytest.raises(InputError, match="5 bytes a row: 9 codes of 3 bits take 4"):
        unpack(torch.zeros(5, dtype=torch.uint8), 3, 9)
