"""Codes of 1 to 8 bits without gaps between them."""

from __future__ import annotations

import torch
from jaxtyping import Integer, UInt8
from torch import Tensor

from assay.core.errors import InputError


def packed_width(n: int, bits: int) -> int:
    """How many bytes `n` codes of `bits` bits take."""
    return -(-n * bits // 8)


def pack(codes: Integer[Tensor, "*rows n"], bits: int) -> UInt8[Tensor, "*rows bytes"]:
    """Store unsigned codes in `bits` bits each, the first in the lowest bits; every row begins a new byte.

    Args:
        codes: from 0 to 2^bits − 1, of any integer type.
        bits: from 1 to 8.

    Returns:
        `packed_width(n, bits)` bytes a row; the bits left over in the last byte are 0.

    Raises:
        InputError: `bits` or a code is out of range.

    >>> pack(torch.tensor([5, 2, 7]), 3)
    tensor([213,   1], dtype=torch.uint8)
    """
    _check(bits)
    if codes.numel() and not (int(codes.min()) >= 0 and int(codes.max()) < 2**bits):
        raise InputError(
            f"codes run from {int(codes.min())} to {int(codes.max())}: {bits} bits hold 0 to {2**bits - 1}"
        )
    n = codes.shape[-1]
    per_word, bytes_per_word = _word(bits)
    codes = torch.nn.functional.pad(codes, (0, -n % per_word)).unflatten(-1, (-1, per_word))
    kind = torch.uint8 if bytes_per_word == 1 else torch.int64
    word = codes[..., 0].to(kind)
    for i in range(1, per_word):
        word = word | (codes[..., i].to(kind) << (bits * i))
    if bytes_per_word > 1:
        shifts = 8 * torch.arange(bytes_per_word, device=codes.device)
        word = ((word[..., None] >> shifts) & 255).to(torch.uint8).flatten(-2)
    return word[..., : packed_width(n, bits)].contiguous()


def unpack(packed: UInt8[Tensor, "*rows bytes"], bits: int, n: int) -> UInt8[Tensor, "*rows n"]:
    """The `n` codes of each row that `pack` stored.

    Raises:
        InputError: `bits` is out of range, or the rows are not of the length that `n` codes take.

    >>> unpack(torch.tensor([213, 1], dtype=torch.uint8), 3, 3)
    tensor([5, 2, 7], dtype=torch.uint8)
    """
    _check(bits)
    if packed.shape[-1] != packed_width(n, bits):
        raise InputError(f"{packed.shape[-1]} bytes a row: {n} codes of {bits} bits take {packed_width(n, bits)}")
    per_word, bytes_per_word = _word(bits)
    if bytes_per_word == 1:
        words = packed[..., None]
    else:
        packed = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bytes_per_word))
        parts = packed.unflatten(-1, (-1, bytes_per_word)).to(torch.int64)
        words = parts[..., 0]
        for i in range(1, bytes_per_word):
            words = words | (parts[..., i] << (8 * i))
        words = words[..., None]
    shifts = (bits * torch.arange(per_word, device=packed.device)).to(words.dtype)
    codes = (words >> shifts) & (2**bits - 1)
    return codes.flatten(-2)[..., :n].to(torch.uint8)


def _check(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise InputError(f"bits is {bits}: codes have 1 to 8 bits")


def _word(bits: int) -> tuple[int, int]:
    """The smallest unit that begins and ends with a whole code: codes in it, and bytes."""
    return (8 // bits, 1) if 8 % bits == 0 else (8, bits)
