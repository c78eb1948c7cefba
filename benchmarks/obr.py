"""Time of restoring one matrix in batches of rows, against one row after the other.

python benchmarks/obr.py [ROWS COLUMNS]    the two shapes of a block of width 576 by default, on one thread
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from assay.compress import Curvature, gptq, obr_matrix, prune_mask, refine, restore, uniform_grid


def row_by_row(imposed: Tensor, free: Tensor, H: Tensor) -> Tensor:
    """The same answer, each row with a factorisation of its own call."""
    answer = torch.zeros_like(imposed)
    for i, row in enumerate(free):
        at = row.nonzero().squeeze(1)
        if len(at):
            factor = torch.linalg.cholesky(H[at][:, at])
            answer[i, at] = torch.cholesky_solve(-(imposed[i] @ H)[at, None], factor)[:, 0]
    return answer


def main(shapes: list[tuple[int, int]]) -> None:
    torch.set_num_threads(1)
    for n_out, n_in in shapes:
        g = torch.Generator().manual_seed(0)
        x = torch.randn(4 * n_in, n_in // 4, generator=g) @ torch.randn(n_in // 4, n_in, generator=g)
        x += torch.randn(x.shape, generator=g)
        w, hessian = torch.randn(n_out, n_in, generator=g), x.T @ x / len(x)
        print(f"{n_out} rows of {n_in}, half of the weights pruned")

        start = time.perf_counter()
        curvature = Curvature.of(hessian)
        print(f"  curvature                 {time.perf_counter() - start:8.2f} s")
        mask = prune_mask(w, hessian=hessian)
        H = curvature.H.float()
        start = time.perf_counter()
        batched = restore(-w * ~mask, mask, H)
        ours = time.perf_counter() - start
        start = time.perf_counter()
        alone = row_by_row(-w * ~mask, mask, H)
        loop = time.perf_counter() - start
        gap = (batched - alone).abs().max().item()
        print(f"  one restoration           {ours:8.2f} s, row by row {loop:.2f} s, largest difference {gap:.1e}")

        start = time.perf_counter()
        grid = uniform_grid(w)
        print(f"  grid with clip search     {time.perf_counter() - start:8.2f} s")
        for rounding in ("rtn", "gptq"):
            start = time.perf_counter()
            new, result = obr_matrix(w, hessian, grid=grid, rounding=rounding)
            print(f"  obr_matrix, {rounding:4}          {time.perf_counter() - start:8.2f} s, error {result.error:.4f}")
        start = time.perf_counter()
        refine(w, new, curvature, grid, mask=result.mask, sweeps=3)
        print(f"  three rounds of descent   {time.perf_counter() - start:8.2f} s")
        start = time.perf_counter()
        gptq(w, hessian, grid, mask=mask)
        print(f"  one sweep instead         {time.perf_counter() - start:8.2f} s")


if __name__ == "__main__":
    asked = [int(a) for a in sys.argv[1:3]]
    main([(asked[0], asked[1])] if len(asked) == 2 else [(576, 1536), (1536, 576)])
