"""What a training step of DDT costs against the straight-through estimator and a plain linear layer.

python benchmarks/ddt.py [SIZE [TOKENS]]    one square layer of SIZE (1024), TOKENS rows (512), on one thread
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from assay.compress import DDTLinear, ddt_codes, ddt_matmul


def milliseconds(call: Callable[[], object], repeats: int = 7) -> float:
    call()
    times = []
    for _ in range(repeats):
        # Of this process: another one on the same core does not count.
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def step(layer: nn.Module, x: torch.Tensor) -> None:
    layer(x).square().mean().backward()


def main(size: int, tokens: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(tokens, size, requires_grad=True)
    plain = nn.Linear(size, size)
    base = milliseconds(lambda: step(plain, x))
    print(f"forward and backward of a plain layer  {base:8.2f} ms")
    for w_bits, a_bits, keep in ((1, 1, None), (4, 4, None), (4, 4, (2, 4))):
        for estimator in ("ddt", "ste"):
            layer = DDTLinear(size, size, w_bits=w_bits, a_bits=a_bits, keep=keep, estimator=estimator)
            spent = milliseconds(lambda layer=layer: step(layer, x))
            name = f"A{a_bits}W{w_bits}{' 2:4' if keep else ''} {estimator}"
            print(f"{name:38s} {spent:8.2f} ms, ratio {spent / base:.2f}")
    layer = DDTLinear(size, size, w_bits=1, a_bits=1)
    packed = layer.export()
    with torch.no_grad():
        print(f"forward of a plain layer               {milliseconds(lambda: plain(x)):8.2f} ms")
        print(f"forward while training, A1W1           {milliseconds(lambda: layer(x)):8.2f} ms")
        print(f"forward of the packed layer, A1W1      {milliseconds(lambda: packed(x)):8.2f} ms")
        codes, weight = ddt_codes(x.detach(), 1), ddt_codes(layer.weight.detach(), 1)
        print(f"product of codes, A1W1                 {milliseconds(lambda: ddt_matmul(codes, weight)):8.2f} ms")
    print(f"stored                                 {packed.packed.bits_per_weight:8.3f} bits per weight")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024, int(sys.argv[2]) if len(sys.argv) > 2 else 512)
