"""Time of a stability curve against plain forward passes on the same inputs, and against whole logits.

    python benchmarks/noise_stability.py [--model builtin:tiny-lm] [--context 128] [--windows 16] [--pairs 64]

The peer is what one writes without assay: noisy copies through the model's own forward, which makes logits at every
position, and the softmax at the last one.
"""

import argparse
import time

import torch

from assay.core.anatomy import anatomy
from assay.core.checkpoint import Checkpoint
from assay.core.text import token_windows
from assay.lens import noise_stability
from assay.reference import PREFIX, builtin
from assay.reference._text import sample

RHO = (0.0, 0.5, 0.9)


def clock(run, repeats):
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny-lm")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = Checkpoint(builtin(args.model).load() if args.model.startswith(PREFIX) else args.model)
    model, tokenizer = checkpoint.load(), checkpoint.tokenizer()
    parts = anatomy(model)
    x = token_windows(tokenizer, [sample()], tokens=args.windows * args.context, context=args.context).input_ids
    copies = args.pairs * len(RHO)
    noisy = torch.randint(parts.vocab_size, (copies, x.shape[1]), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def passes():
        for rows in (*x.split(64), *noisy.split(64)):
            parts.backbone(input_ids=rows, use_cache=False)

    @torch.no_grad()
    def peer():
        clean = torch.cat([model(input_ids=rows, use_cache=False).logits[:, -1].softmax(-1) for rows in x.split(64)])
        which = torch.arange(args.pairs) % len(x)
        for rho in RHO:
            keep = torch.rand(args.pairs, x.shape[1]) < rho
            y = torch.where(keep, x[which], torch.randint_like(x[which], parts.vocab_size))
            out = [model(input_ids=rows, use_cache=False).logits[:, -1].softmax(-1) for rows in y.split(64)]
            (clean[which] * torch.cat(out)).sum(-1).mean()

    def assay():
        noise_stability(model, x, RHO, kernel="bonami", n_pairs=args.pairs, protect=tokenizer.all_special_ids)

    base = clock(passes, args.repeats)
    print(f"{len(x) + copies} passes of {x.shape[1]} tokens")
    for name, run in (("forward passes alone", passes), ("whole logits", peer), ("assay", assay)):
        seconds = clock(run, args.repeats)
        print(f"{name:22} {seconds:8.2f} s  {seconds / base:6.2f} of the passes")


if __name__ == "__main__":
    main()
