"""Time of one pass with spectra against a plain forward pass, and of the eigenvalues afterwards.

    python benchmarks/nerve.py [--tokens 2048] [--context 512] [--model builtin:smollm2]

The peer is a plain forward pass that keeps every feed-forward activation and takes covariances at the end.
"""

import argparse
import time
from pathlib import Path

import psutil
import torch

from assay.core.anatomy import anatomy
from assay.core.checkpoint import Checkpoint
from assay.core.text import token_windows
from assay.core.trace import trace
from assay.lens import NerveReducer, spectrum_metrics
from assay.reference import PREFIX, builtin
from assay.reference._text import sample


def clock(run):
    start = time.perf_counter()
    value = run()
    return time.perf_counter() - start, value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--model", default="builtin:smollm2")
    args = parser.parse_args()
    path = builtin(args.model).load() if args.model.startswith(PREFIX) else Path(args.model)
    checkpoint = Checkpoint(path)
    model = checkpoint.load(torch.float32)
    found = anatomy(model)
    batches = list(
        token_windows(checkpoint.tokenizer(), [sample()], tokens=args.tokens, context=args.context).batches(1)
    )

    def kept():
        seen = {}
        hooks = []
        for b in found.blocks:
            first = b.mlp.up if b.mlp.gate is None else b.mlp.gate
            hooks.append(first.module.register_forward_hook(
                lambda m, a, o, i=b.index, t=first.take: seen.setdefault((i, "pre"), []).append(t(o))))  # fmt: skip
            hooks.append(b.mlp.down.module.register_forward_pre_hook(
                lambda m, a, i=b.index: seen.setdefault((i, "post"), []).append(a[0])))  # fmt: skip
        with torch.no_grad():
            for ids in batches:
                found.backbone(input_ids=ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        covariances = [torch.cat([p.flatten(0, 1) for p in parts]).T.cov() for parts in seen.values()]
        return [spectrum_metrics(eigs=torch.linalg.eigvalsh(c.double())) for c in covariances]

    reducer = NerveReducer(found)
    trace(model, batches[:1], [], anatomy=found)
    plain, _ = clock(lambda: trace(model, batches, [], anatomy=found))
    passed, _ = clock(lambda: trace(model, batches, [reducer], anatomy=found))
    eigen, _ = clock(reducer.result)
    peer, _ = clock(kept)
    print(f"plain forward pass       {plain:7.2f} s   1.00×")
    print(f"with covariances         {passed:7.2f} s   {passed / plain:.2f}×")
    print(
        f"eigenvalues              {eigen:7.2f} s   {len(found.blocks) * 2} matrices of {found.blocks[0].mlp.down.in_features}"
    )
    print(f"keep all, then the same  {peer:7.2f} s   {peer / (passed + eigen):.2f}× the two together")
    print(f"resident memory at the end {psutil.Process().memory_info().rss / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
