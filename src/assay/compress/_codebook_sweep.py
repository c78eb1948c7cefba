"""Rounding to a codebook column by column, each error made good by the columns that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from assay.compress._blockwise import QTensor
from assay.compress._uniform import Curvature, refine, sweep
from assay.core.errors import InputError


@dataclass(frozen=True, eq=False)
class _CodebookGrid:
    """The levels of every weight of a packed matrix, its scales and outliers held as they are."""

    scale: Float[Tensor, "out in"]
    levels: Float[Tensor, "levels"]
    bounds: Float[Tensor, "bounds"]
    outliers: Bool[Tensor, "out in"] | None

    @classmethod
    def of(cls, packed: QTensor) -> _CodebookGrid:
        n = packed.shape.numel()
        scale = packed.scales.float().repeat_interleave(packed.block_size)[:n].view(packed.shape)
        outliers = None
        if packed.n_outliers:
            outliers = torch.zeros(n, dtype=torch.bool, device=scale.device)
            outliers[packed.outlier_index] = True
            outliers = outliers.view(packed.shape)
        levels = packed.levels
        return cls(scale, levels, (levels[1:] + levels[:-1]) / 2, outliers)

    def index(self, weight: Tensor, scale: Tensor) -> Tensor:
        return torch.bucketize(weight / torch.where(scale == 0, 1, scale), self.bounds)

    def nearest(self, weight: Float[Tensor, "out columns"], start: int = 0) -> Float[Tensor, "out columns"]:
        """The values on the grid that lie nearest; an outlier is only rounded to sixteen bits."""
        at = slice(start, start + weight.shape[1])
        scale = self.scale[:, at]
        values = self.levels[self.index(weight, scale)] * scale
        if self.outliers is None:
            return values
        return torch.where(self.outliers[:, at], weight.to(torch.bfloat16).to(weight.dtype), values)


def codebook_sweep(
    weight: Float[Tensor, "out in"], packed: QTensor, curvature: Curvature, *, rounds: int = 3
) -> QTensor:
    """Choose the codes of a packed matrix anew, so that its outputs on the calibration inputs change least.

    Args:
        weight: what was packed.
        packed: its scales, levels and the places of its outliers stay; its codebook is "signed" or "absmax".
        curvature: of the matrix's inputs.
        rounds: of coordinate descent afterwards.

    Raises:
        InputError: the codebook is of another kind.

    Source:
        GPTQ (arXiv 2210.17323), with the levels of a codebook in place of a uniform grid.
    """
    if packed.offsets is not None:
        raise InputError('the codebook has scaling "minmax": the sweep takes "signed" and "absmax"')
    grid = _CodebookGrid.of(packed)
    w = weight.detach().float()
    values = refine(w, sweep(w, curvature, grid), curvature, grid, sweeps=rounds)
    codes = grid.index(values, grid.scale).to(torch.uint8).flatten()
    if codes.numel() % 2:
        codes = torch.cat([codes, codes.new_zeros(1)])
    kept = values.flatten()[packed.outlier_index].to(torch.bfloat16)
    return replace(packed, codes=codes[0::2] | (codes[1::2] << 4), outlier_value=kept)
