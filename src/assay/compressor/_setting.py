"""What can be done to a layer, checked before any work starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from assay.compress._blockwise import quantize
from assay.compress._bof4 import solve_codebook
from assay.compress._codebook_sweep import codebook_sweep
from assay.compress._logart import logart_weight
from assay.compress._obr import obr_matrix, parse_pattern
from assay.compress._packed import SparseTensor, UniformTensor, stored_bits
from assay.compress._packed_linear import Packed
from assay.compress._packing import packed_width
from assay.compress._uniform import Curvature, output_error, refine, rtn, sweep, uniform_grid
from assay.core.errors import InputError

MethodName = Literal["gptq", "rtn", "obr", "bof4", "logart"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)

# Beyond this quantile of a block's largest weight, "bof4" keeps a weight in 16 bits. Higher than where the weights are
# rounded without data: what an outlier costs its block, the sweep makes good for the most part, and each takes 80 bits.
_OUTLIERS = 0.99
# Rounds of coordinate descent after a column-by-column sweep: what three do not find, more hardly do.
_ROUNDS = 3
# What "logart" stores of each row beside its codes.
_LOG_ROW_BITS = 40


@dataclass(frozen=True)
class Outcome:
    """What became of one layer.

    Attributes:
        packed: as it is stored.
        dense: as it is used, `[out, in]`, float32.
        error: squared error of the outputs on the calibration inputs, as a share of the outputs' own square; NaN
            without calibration inputs.
        note: what the reader should know; empty in the usual case.
    """

    packed: Packed
    dense: Float[Tensor, "out in"]
    error: float
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """A method and its numbers, for one layer or for all.

    Args:
        method: "gptq" rounds column by column, "rtn" to the nearest level, "obr" prunes and rounds together, "bof4" has a
            codebook of 16 levels, "logart" levels that are powers of √2.
        bits: of a code. "bof4" has 4.
        group_size: weights that share a scale; None for whole rows. "logart" has whole rows.
        symmetric: levels around zero; otherwise each group stores a zero point ("gptq" and "rtn").
        sparsity: the share of each row that "obr" prunes.
        pattern: "2:4" and the like, in place of `sparsity`.

    Raises:
        InputError: the numbers do not go together.
    """

    method: MethodName = "gptq"
    bits: int = 4
    group_size: int | None = 64
    symmetric: bool = True
    sparsity: float | None = None
    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"--method is {self.method!r}: choose one of {', '.join(METHODS)}")
        low, high = {"bof4": (4, 4), "logart": (2, 6)}.get(self.method, (2, 8))
        if not low <= self.bits <= high:
            many = f"takes {low} to {high}" if low < high else f"has {low}"
            raise InputError(f"--bits is {self.bits}: {self.method} {many}")
        if self.group_size is not None and self.group_size < 2:
            raise InputError(f"--group-size is {self.group_size}: give at least 2, or 0 for whole rows")
        if self.method != "obr" and (self.sparsity is not None or self.pattern is not None):
            raise InputError(f"--sparsity and --pattern go with --method obr, not with {self.method}")
        if not self.symmetric and not self.exchangeable:
            raise InputError(f"--asymmetric goes with --method gptq or rtn, not with {self.method}")
        if self.sparsity is not None and not 0 <= self.sparsity < 1:
            raise InputError(f"--sparsity is {self.sparsity}: give a share from 0 to below 1")
        if self.sparsity is not None and self.pattern is not None:
            raise InputError("--sparsity and --pattern exclude each other")
        try:
            parse_pattern(self.pattern)
        except InputError as error:
            raise InputError(f"--{error}") from error

    @property
    def name(self) -> str:
        """What tables call it."""
        parts = [self.method, f"{self.bits} bit"]
        if self.method != "logart":
            parts.append("rows" if self.group_size is None else f"g{self.group_size}")
        if not self.symmetric:
            parts.append("asymmetric")
        if self.method == "obr":
            parts.append(self.pattern or f"{self._sparsity:.0%} pruned")
        return " ".join(parts)

    @property
    def _sparsity(self) -> float:
        return 0.5 if self.sparsity is None else self.sparsity

    def check_width(self, name: str, n_in: int, common: int | None = None) -> None:
        """Refuse a layer whose width the numbers do not fit.

        Args:
            name: of the layer, for the message.
            n_in: its width.
            common: the greatest common divisor of all layers' widths, where the format has no shorter last group; None
                where it has.

        Raises:
            InputError: the pattern does not divide the width, or the group size does not where it must.
        """
        pattern = parse_pattern(self.pattern)
        if pattern is not None and n_in % pattern[1]:
            raise InputError(f"--pattern {self.pattern}: the width {n_in} of {name} is not divisible by {pattern[1]}")
        size = self.group_size
        if common is None or size is None or n_in % size == 0:
            return
        near = sorted((d for d in range(8, common + 1) if common % d == 0), key=lambda d: abs(d - size))[:3]
        fit = f"{', '.join(map(str, sorted(near)))} would do for every layer" if near else "no size fits every layer"
        raise InputError(
            f"--group-size {size} does not divide the width {n_in} of {name}: {fit}; 0 means whole rows, and "
            "--method obr and bof4 take any size"
        )

    @property
    def exchangeable(self) -> bool:
        """Whether other software reads the layers: the format of the library compressed-tensors has them."""
        return self.method in ("gptq", "rtn")

    def bits_per_weight(self, n_out: int, n_in: int) -> float:
        """What a layer of this shape will take, outliers of "bof4" at what normal weights have."""
        size = n_in if self.group_size is None else min(self.group_size, n_in)
        if self.method == "bof4":
            return 4 + 16 / size + 0.03
        if self.method == "logart":
            return (8 * packed_width(n_in, self.bits) + _LOG_ROW_BITS) / n_in
        if self.method == "obr":
            pattern = parse_pattern(self.pattern)
            kept = n_in - int(n_in * self._sparsity) if pattern is None else n_in * pattern[0] // pattern[1]
            return stored_bits(n_out, n_in, self.bits, size, kept=kept)
        zeros = 0 if self.symmetric else self.bits * -(-n_in // size) / n_in
        return stored_bits(n_out, n_in, self.bits, size) + zeros

    def apply(
        self,
        weight: Float[Tensor, "out in"],
        hessian: Float[Tensor, "in in"] | None,
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> Outcome:
        """Pack a matrix.

        Args:
            weight: float32.
            hessian: second moments of its inputs; without them every method falls back on what it does with weights
                alone.
            scale_dtype: of the scales of uniform grids, sixteen bits.
        """
        note = "" if hessian is not None else "too few tokens came here: rounded without knowing the inputs"
        if self.method == "logart":
            log = logart_weight(weight, hessian, bits=self.bits)
            return self._outcome(log, weight, hessian, note)
        if self.method == "bof4":
            size = weight.shape[1] if self.group_size is None else self.group_size
            blocks = quantize(weight, solve_codebook(size), size, _OUTLIERS, scale_dtype=torch.bfloat16)
            if hessian is not None:
                blocks = codebook_sweep(weight, blocks, Curvature.of(hessian), rounds=_ROUNDS)
            return self._outcome(blocks, weight, hessian, note)
        importance = None if hessian is None else hessian.diagonal()
        grid = uniform_grid(
            weight,
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.symmetric,
            importance=None if self.method == "rtn" else importance,
            scale_dtype=scale_dtype,
        )
        if self.method == "obr":
            moments = torch.eye(weight.shape[1], device=weight.device) if hessian is None else hessian
            # SparseGPT's scores, a row at a time: in the trial of obr they beat Wanda's, which are its paper's.
            values, result = obr_matrix(
                weight, moments, sparsity=self._sparsity, pattern=self.pattern, grid=grid, scorer="sparsegpt"
            )
            values = refine(weight, values, Curvature.of(moments), grid, mask=result.mask, sweeps=_ROUNDS)
            return self._outcome(SparseTensor.of(values, result.mask, grid, scale_dtype), weight, hessian, note)
        if self.method == "rtn" or hessian is None:
            values = grid.values(rtn(weight, grid))
        else:
            curvature = Curvature.of(hessian)
            values = refine(weight, sweep(weight, curvature, grid), curvature, grid, sweeps=_ROUNDS)
        return self._outcome(UniformTensor.of(values, grid, scale_dtype), weight, hessian, note)

    @staticmethod
    def _outcome(packed: Any, weight: Tensor, hessian: Tensor | None, note: str) -> Outcome:
        dense = packed.dequantize().float()
        error = float("nan") if hessian is None else output_error(weight, dense, hessian)
        return Outcome(packed, dense, error, note)
