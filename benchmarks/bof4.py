"""Speed and memory of 4-bit blocks against a 16-bit linear layer, and against bitsandbytes where it is installed.

python benchmarks/bof4.py [SIZE]    one square layer of SIZE (4096), on one thread
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from assay.compress import nf4_codebook, quantize, quantize_module, solve_codebook


def seconds(call: Callable[[], object], repeats: int = 9) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.no_grad()
def main(size: int) -> None:
    torch.set_num_threads(1)
    layer = nn.Linear(size, size, bias=False, dtype=torch.bfloat16)
    weight = layer.weight.detach()
    n = weight.numel()
    start = time.perf_counter()
    book = solve_codebook(64)
    print(f"solve the levels for blocks of 64      {1e3 * (time.perf_counter() - start):8.1f} ms")

    packed = quantize_module(nn.Linear(size, size, bias=False, dtype=torch.bfloat16), book, opq=0.95)
    stored = sum(b.numel() * b.element_size() for b in packed.buffers())
    print(f"stored                                 {stored / n:8.3f} bytes per weight")
    print(
        f"quantise, no outliers apart            {1e9 * seconds(lambda: quantize(weight, book, opq=None)) / n:8.2f} ns per weight"
    )
    print(
        f"quantise, OPQ 0.95                     {1e9 * seconds(lambda: quantize(weight, book)) / n:8.2f} ns per weight"
    )
    ours = quantize(weight, nf4_codebook(), opq=None)
    print(f"decode to bfloat16                     {1e9 * seconds(ours.dequantize) / n:8.2f} ns per weight")
    for rows in (1, 16, 256):
        x = torch.randn(rows, size, dtype=torch.bfloat16)
        ours_s, plain_s = seconds(lambda x=x: packed(x)), seconds(lambda x=x: layer(x))
        print(
            f"forward, {rows:3d} rows: {1e3 * ours_s:8.2f} ms, bfloat16 linear {1e3 * plain_s:8.2f} ms, "
            f"ratio {ours_s / plain_s:.2f}"
        )

    if importlib.util.find_spec("bitsandbytes") is None:
        print("bitsandbytes is not installed: no comparison with it")
        return
    import bitsandbytes as bnb
    from bitsandbytes import functional as peer

    codes, state = peer.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    gap = (peer.dequantize_4bit(codes, state).float() - ours.dequantize().float()).abs().max().item()
    print(f"bitsandbytes {bnb.__version__}, NF4: largest difference of decoded weights {gap:.3g}")
    peer_s = seconds(lambda: peer.quantize_4bit(weight, blocksize=64, quant_type="nf4"))
    ours_s = seconds(lambda: quantize(weight, nf4_codebook(), opq=None))
    print(f"quantise NF4: ours {1e9 * ours_s / n:.2f}, theirs {1e9 * peer_s / n:.2f} ns per weight")
    peer_s, ours_s = seconds(lambda: peer.dequantize_4bit(codes, state)), seconds(ours.dequantize)
    print(f"decode NF4:   ours {1e9 * ours_s / n:.2f}, theirs {1e9 * peer_s / n:.2f} ns per weight")
    for rows in (1, 16, 256):
        x = torch.randn(rows, size, dtype=torch.bfloat16)
        peer_s = seconds(lambda x=x: bnb.matmul_4bit(x, codes.t(), quant_state=state))
        print(f"forward, {rows:3d} rows: theirs {1e3 * peer_s:8.2f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4096)
