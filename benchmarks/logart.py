"""Speed of searching, learning, packing and using logarithmic weights.

python benchmarks/logart.py [OUT IN]    one matrix of OUT by IN (576 1536), on one thread
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from assay.compress import learn_rounding, logart, logart_weight, search_log_grid


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.no_grad()
def main(n_out: int, n_in: int) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n_out, n_in, generator=generator) / n_in**0.5
    x = torch.randn(2048, n_in, generator=generator) @ torch.randn(n_in, n_in, generator=generator) / n_in**0.5
    gram = x.T @ x
    n = weight.numel()
    print(f"search by weights                  {seconds(lambda: search_log_grid(weight), 3):8.3f} s")
    print(f"search by outputs, shortlist of 8  {seconds(lambda: search_log_grid(weight, gram), 3):8.3f} s")
    start = time.perf_counter()
    full = search_log_grid(weight[:64], gram, shortlist=None)
    print(
        f"search by outputs, all candidates  {(time.perf_counter() - start) * n_out / 64:8.3f} s (from 64 rows; shortlist"
    )
    short = search_log_grid(weight, gram)
    errors = []
    for grid in (short[:64], full):
        gap = grid.quantize(weight[:64])[0] - weight[:64]
        errors.append(((gap @ gram) * gap).sum().item())
    print(f"                                            has {errors[0] / errors[1]:.3f} times its error)")
    steps = (20, 60)
    low, high = (seconds(lambda k=k: learn_rounding(weight, short, gram, iters=k), 1) for k in steps)
    print(f"learn, a step                      {1e9 * (high - low) / (steps[1] - steps[0]) / n:8.2f} ns per weight")
    start = time.perf_counter()
    packed = logart_weight(weight, gram)
    print(f"logart_weight, 4 bits              {time.perf_counter() - start:8.3f} s")
    print(f"stored                             {packed.bits_per_weight:8.3f} bits per weight")
    print(f"decode                             {1e9 * seconds(packed.dequantize) / n:8.2f} ns per weight")
    plain = nn.Linear(n_in, n_out, bias=False)
    layer, _ = logart(nn.Linear(n_in, n_out, bias=False), bits=4)
    for rows in (1, 16, 256):
        x = torch.randn(rows, n_in)
        ours, theirs = seconds(lambda x=x: layer(x)), seconds(lambda x=x: plain(x))
        print(
            f"forward, {rows:3d} rows: {1e3 * ours:8.2f} ms, float32 linear {1e3 * theirs:8.2f} ms, "
            f"ratio {ours / theirs:.1f}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3])) if len(sys.argv) > 2 else main(576, 1536)
