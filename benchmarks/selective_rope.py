"""Time of Selective RoPE against plain RoPE and `rotary-embedding-torch`, and of gated linear attention by chunk size.

    python benchmarks/selective_rope.py [--tokens 2048] [--heads 9] [--head-dim 64] [--repeats 15]

All rotate queries and keys of one layer at batch 1 on one thread without gradients. Plain RoPE looks its cosines and
sines up in a table, the peer keeps such a table too; Selective RoPE has to project, sum and take cosines of every token.
The peer is skipped where it is not installed.
"""

import argparse
import statistics
import time

import torch

from assay.models import GatedLinearAttention, SelectiveRoPE


def table_rope(tokens, head_dim):
    """Rotation of halves with a ready table."""
    frequency = 500_000.0 ** (-torch.arange(head_dim // 2) * 2 / head_dim)
    angle = torch.arange(tokens)[:, None] * frequency
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def turn(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    return lambda q, k: (turn(q), turn(k))


def contestants(args):
    torch.manual_seed(0)
    width = args.heads * args.head_dim
    hidden = torch.randn(1, args.tokens, width)
    q, k = (torch.randn(1, args.tokens, args.heads, args.head_dim) for _ in range(2))
    plain = table_rope(args.tokens, args.head_dim)
    yield "plain RoPE, table", lambda: plain(q, k)
    try:
        from rotary_embedding_torch import RotaryEmbedding
    except ImportError:
        print("rotary-embedding-torch is not installed and left out")
    else:
        peer = RotaryEmbedding(args.head_dim, theta=500_000, seq_before_head_dim=True)
        yield "rotary-embedding-torch", lambda: (peer.rotate_queries_or_keys(q), peer.rotate_queries_or_keys(k))
    for name, options in (
        ("Selective RoPE, rank 16", {}),
        ("Selective RoPE, full rank", {"rank": None}),
        ("Selective RoPE, no convolution", {"conv": None}),
        ("Selective RoPE, SiLU, bias, gate", {"act": "silu", "bias": True, "gate": "head"}),
    ):
        rope = SelectiveRoPE(width, args.heads, args.head_dim, **options)
        yield name, lambda rope=rope: rope(q, k, hidden)
    for chunk in (1, 16, 64):
        layer = GatedLinearAttention(width, args.heads, pos="none", chunk=chunk)
        yield f"GLA layer, no positions, chunk {chunk}", lambda layer=layer: layer(hidden)
    layer = GatedLinearAttention(width, args.heads, pos="selective")
    yield "GLA layer, Selective RoPE, chunk 16", lambda: layer(hidden)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = list(contestants(args))
    times = {name: [] for name, _ in runs}
    for _, run in runs:
        run()
    # Taken in turns, so that a slow spell of the machine falls on all.
    for _ in range(args.repeats):
        for name, run in runs:
            start = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - start))
    base = statistics.median(times["plain RoPE, table"])
    print(f"batch 1, {args.tokens} tokens, {args.heads} heads of {args.head_dim}, median of {args.repeats}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:36s} {median:9.2f} ms   {median / base:6.2f} × plain RoPE")


if __name__ == "__main__":
    main()
