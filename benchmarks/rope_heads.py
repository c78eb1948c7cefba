"""Block-exchange scores against the definition done in full: every pair of blocks swapped, rotated and attended anew.

Run with `python benchmarks/rope_heads.py`. Prints the seconds for the heads of one layer on one prompt, and how much
longer a traced forward pass of a small model takes when its heads are scored.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from assay.core.trace import AttentionView, Batch, Reducer, trace
from assay.lens._rope_heads import RopeHeadsReducer, block_swap_scores

HEADS, TOKENS, WIDTH, BLOCKS = 12, 1024, 64, 16


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def in_full(q: Tensor, k: Tensor, theta: Tensor) -> Tensor:
    """`pos − sym` of each head, uniform weights, with a full attention row per exchange."""
    n = k.shape[1]
    size = n // BLOCKS
    angle = torch.arange(n)[:, None] * theta
    cos, sin = angle.cos(), angle.sin()

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    query = turn(q[:, None].expand(-1, n, -1))[:, -1:]

    def block_means(keys: Tensor) -> Tensor:
        logits = (query @ turn(keys).mT)[:, 0] * WIDTH**-0.5
        return torch.softmax(logits, -1).view(HEADS, BLOCKS, size).mean(-1)

    clean = block_means(k)
    differences = []
    for i, j in itertools.combinations(range(BLOCKS), 2):
        order = list(range(BLOCKS))
        order[i], order[j] = j, i
        swapped = block_means(k.view(HEADS, BLOCKS, size, WIDTH)[:, order].reshape(HEADS, n, WIDTH))
        old, new = clean[:, [i, j]], swapped[:, [i, j]]
        pos = torch.cosine_similarity(new, old, dim=-1, eps=0)
        differences.append(pos - torch.cosine_similarity(new, old.flip(-1), dim=-1, eps=0))
    return torch.stack(differences).mean(0)


class Watch(Reducer):
    sites = ("attn",)

    def update(self, site: str, layer: int, value: AttentionView, batch: Batch) -> None:
        return None


def main() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(HEADS, WIDTH), torch.randn(HEADS, TOKENS, WIDTH)
    theta = 10_000 ** -(torch.arange(WIDTH // 2) / (WIDTH // 2))

    def fast() -> Tensor:
        scores = block_swap_scores(q, k, theta=theta, blocks=BLOCKS, weighting="uniform")
        return scores.pos - scores.sym

    with torch.no_grad():
        assert torch.allclose(fast(), in_full(q, k, theta), atol=1e-4)
        quick, full = seconds(fast), seconds(lambda: in_full(q, k, theta))
        print(
            f"{HEADS} heads, {TOKENS} keys, {BLOCKS} blocks: {quick:.4f} s, in full {full:.4f} s, {full / quick:.1f} x"
        )

    config = LlamaConfig(
        vocab_size=1000, hidden_size=768, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=12
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(1000, (4, 512))
    plain = seconds(lambda: trace(model, [ids], [Watch()]))
    for name, options in {"scores": {}, "scores by frequency": {"per_frequency": True}}.items():
        scored = seconds(lambda options=options: trace(model, [ids], [RopeHeadsReducer(**options)]))
        print(f"{name}: a traced pass of {plain:.3f} s becomes {scored:.3f} s, {scored / plain:.2f} x")


if __name__ == "__main__":
    main()
