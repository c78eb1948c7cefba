"""Cost of sampling with a table: operations and time against the full model, by table and by width; and of the solver.

python benchmarks/diffsparse.py [WIDTH]    a transformer of 4 blocks of WIDTH (256) on 256 tokens, 10 steps, one thread
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from assay.compress import BlockSpec, Importance, TokenCache, allocate_sparsity, hand_keep
from assay.reference.tiny_dit import DiTConfig, TinyDiT, draw_noise, euler

STEPS, SIDE, BATCH = 10, 16, 4


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ratio(call: Callable[[], object], reference: Callable[[], object], repeats: int = 5) -> float:
    """Median of the ratios of neighbouring runs, so that a busy machine slows both."""
    found = []
    for _ in range(repeats):
        marks = [time.perf_counter()]
        for run in (call, reference):
            run()
            marks.append(time.perf_counter())
        found.append((marks[1] - marks[0]) / (marks[2] - marks[1]))
    return statistics.median(found)


def operations(call: Callable[[], object]) -> int:
    # The counter sees attention only where it is made of matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@torch.no_grad()
def main(width: int) -> None:
    torch.set_num_threads(1)
    streams = torch.Generator().manual_seed(0)
    for steps, blocks in ((20, 28), (50, 28)):
        cost = torch.randn(steps * blocks, 5, generator=streams)
        ms = 1e3 * seconds(lambda cost=cost: allocate_sparsity(cost, range(5), 2 * len(cost)))
        print(f"solve {steps} steps x {blocks} blocks x 5 levels: {ms:.1f} ms")

    torch.manual_seed(0)
    config = DiTConfig(image_size=SIDE, hidden_size=width, num_attention_heads=width // 64)
    model = TinyDiT(config).eval()
    blocks = [BlockSpec(b.mlp, b.attention, attend=b.attention.attend) for b in model.blocks]
    noise, label = draw_noise(BATCH, streams, config)

    def full() -> object:
        return euler(model, noise, label, STEPS)

    full_s, full_n = seconds(full), operations(full)
    print(f"width {width}, {SIDE**2} tokens: full model {1e3 * full_s / BATCH:.1f} ms an image")
    print("kept tokens after the first step   operations   time, over the full model")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        keep = torch.full((STEPS, len(blocks)), share)
        keep[0] = 1

        def sparse(keep: torch.Tensor = keep) -> object:
            with TokenCache(model, blocks, keep, Importance(grid=(SIDE, SIDE))):
                return euler(model, noise, label, STEPS)

        print(f"{share:32.0%} {operations(sparse) / full_n:12.3f} {ratio(sparse, full):12.3f}")
    units = (0, 1, 2, 3, 7)
    keep = hand_keep(STEPS, len(blocks), 7 * STEPS * len(blocks) // 2, units=units, cycle=2)

    def every_second() -> object:
        with TokenCache(model, blocks, keep):
            return euler(model, noise, label, STEPS)

    done = operations(every_second) / full_n
    print(f"{'every second step in full':>32} {done:12.3f} {ratio(every_second, full):12.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 256)
