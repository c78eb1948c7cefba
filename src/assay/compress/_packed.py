"""Matrices on a uniform grid as they are stored, whole or with the pruned weights left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int8, UInt8
from torch import Tensor

from assay.compress._packing import pack, packed_width, unpack
from assay.compress._uniform import UniformGrid


@dataclass(frozen=True, eq=False)
class UniformTensor:
    """A matrix of integer codes without gaps, with a scale (and perhaps a zero point) for each group of columns.

    Attributes:
        codes: of each row, `bits` bits a code, counted from 0 for the lowest level.
        scale: of each group.
        zero: the code of the value 0 of each group, from −2^(bits−1); None where that is 0 everywhere.
        bits: of a code.
        group_size: columns a group; the last group may be shorter.
        shape: rows and columns.

    Example:
        >>> import torch
        >>> from assay.compress import UniformTensor, uniform_grid
        >>> w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        >>> grid = uniform_grid(w, bits=4, group_size=32, scale_dtype=torch.bfloat16)
        >>> packed = UniformTensor.of(grid.nearest(w), grid)
        >>> packed.bits_per_weight, torch.equal(packed.dequantize(), grid.nearest(w))
        (4.5, True)
    """

    codes: UInt8[Tensor, "out bytes"]
    scale: Float[Tensor, "out groups"]
    zero: Int8[Tensor, "out groups"] | None
    bits: int
    group_size: int
    shape: torch.Size

    @classmethod
    def of(
        cls, values: Float[Tensor, "out in"], grid: UniformGrid, scale_dtype: torch.dtype = torch.bfloat16
    ) -> UniformTensor:
        """Pack values that lie on a grid.

        Args:
            values: the matrix; what lies between levels takes the nearest.
            grid: its levels.
            scale_dtype: what the scales are stored as; the grid's own should be of that type already.
        """
        codes = pack(grid.codes(values).to(torch.int16) - grid.low, grid.bits)
        zero = None if grid.zero is None else grid.zero.to(torch.int8)
        return cls(codes, grid.scale.to(scale_dtype), zero, grid.bits, grid.group_size, values.shape)

    @property
    def grid(self) -> UniformGrid:
        """The levels."""
        zero = None if self.zero is None else self.zero.float()
        return UniformGrid(self.scale.float(), zero, self.bits, self.group_size)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights; a zero point takes as many as a code."""
        zeros = 0 if self.zero is None else self.zero.numel() * self.bits
        return (8 * (self.codes.nbytes + self.scale.nbytes) + zeros) / self.shape.numel()

    def rows(self, first: int, last: int) -> Float[Tensor, "rows in"]:
        """Some rows, decoded."""
        at = slice(first, last)
        grid = UniformGrid(
            self.scale[at].float(),
            None if self.zero is None else self.zero[at].float(),
            self.bits,
            self.group_size,
        )
        return grid.values(unpack(self.codes[at], self.bits, self.shape[1]).float().add_(grid.low))

    def dequantize(self) -> Float[Tensor, "out in"]:
        """The whole matrix, float32."""
        return self.rows(0, self.shape[0])

    def tensors(self) -> dict[str, Tensor]:
        """What has to be stored."""
        stored = {"codes": self.codes, "scale": self.scale}
        return stored if self.zero is None else stored | {"zero": self.zero}

    def settings(self) -> dict[str, Any]:
        """What else has to be known."""
        return {"bits": self.bits, "group_size": self.group_size}

    @classmethod
    def from_stored(
        cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], shape: torch.Size
    ) -> UniformTensor:
        """The inverse of `tensors` and `settings`."""
        return cls(tensors["codes"], tensors["scale"], tensors.get("zero"), **settings, shape=shape)


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """Like `UniformTensor`, but only the weights that were kept have codes, and one bit a weight says which.

    For 2:4 that bit map is as large as the two 2-bit indices of each four that hardware wants.

    Attributes:
        bitmap: one bit a weight, set where it is kept.
        codes: of the kept weights of each row in their order; rows that keep fewer end in zeros.
        scale: as in `UniformTensor`.
        kept: the most weights that a row keeps.
        bits: of a code.
        group_size: as in `UniformTensor`.
        shape: rows and columns.
    """

    bitmap: UInt8[Tensor, "out bytes"]
    codes: UInt8[Tensor, "out bytes"]
    scale: Float[Tensor, "out groups"]
    kept: int
    bits: int
    group_size: int
    shape: torch.Size

    @classmethod
    def of(
        cls,
        values: Float[Tensor, "out in"],
        mask: Bool[Tensor, "out in"],
        grid: UniformGrid,
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> SparseTensor:
        """Pack values that lie on a symmetric grid; what the mask leaves out is zero when decoded."""
        codes = grid.codes(values).to(torch.int16) - grid.low
        counts = mask.sum(1)
        width = int(counts.max()) if len(mask) else 0
        dense = torch.zeros(len(mask), width, dtype=torch.int16, device=mask.device)
        dense[torch.arange(width, device=mask.device) < counts[:, None]] = codes[mask]
        return cls(
            pack(mask.to(torch.uint8), 1),
            pack(dense, grid.bits),
            grid.scale.to(scale_dtype),
            width,
            grid.bits,
            grid.group_size,
            values.shape,
        )

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights, the bit map included."""
        return 8 * (self.codes.nbytes + self.scale.nbytes + self.bitmap.nbytes) / self.shape.numel()

    @property
    def sparsity(self) -> float:
        """The share of weights that have no code."""
        mask = unpack(self.bitmap, 1, self.shape[1])
        return 1 - float(mask.sum(dtype=torch.int64)) / self.shape.numel()

    def rows(self, first: int, last: int) -> Float[Tensor, "rows in"]:
        """Some rows, decoded."""
        at = slice(first, last)
        mask = unpack(self.bitmap[at], 1, self.shape[1]).bool()
        real = torch.arange(self.kept, device=mask.device) < mask.sum(1)[:, None]
        codes = unpack(self.codes[at], self.bits, self.kept).float()
        grid = UniformGrid(self.scale[at].float(), None, self.bits, self.group_size)
        dense = torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, codes[real] + grid.low)
        return grid.values(dense)

    def dequantize(self) -> Float[Tensor, "out in"]:
        """The whole matrix, float32."""
        return self.rows(0, self.shape[0])

    def tensors(self) -> dict[str, Tensor]:
        """What has to be stored."""
        return {"bitmap": self.bitmap, "codes": self.codes, "scale": self.scale}

    def settings(self) -> dict[str, Any]:
        """What else has to be known."""
        return {"kept": self.kept, "bits": self.bits, "group_size": self.group_size}

    @classmethod
    def from_stored(cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], shape: torch.Size) -> SparseTensor:
        """The inverse of `tensors` and `settings`."""
        return cls(tensors["bitmap"], tensors["codes"], tensors["scale"], **settings, shape=shape)


def stored_bits(n_out: int, n_in: int, bits: int, group_size: int, *, kept: int | None = None) -> float:
    """Bits a weight of a matrix stored with bfloat16 scales: all weights, or `kept` of each row and a bit map."""
    groups = -(-n_in // group_size)
    codes = packed_width(n_in if kept is None else kept, bits) + (0 if kept is None else packed_width(n_in, 1))
    return 8 * (codes + 2 * groups) / n_in
