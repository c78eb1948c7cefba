"""Write a Qwen2-shaped checkpoint with random weights, shard by shard: something large to measure time and memory on.

The default has the shape of Qwen2-1.5B: 1.5 billion bf16 parameters, 3.1 GB. One
tensor at a time is drawn and one shard at a time is held. The same arguments write the same bytes.

    python scripts/make_random_checkpoint.py --out /tmp/qwen2-1.5b
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config

from assay.reference import tiny_lm

PRESETS = {
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
# What the shape has beyond the tiny tokenizer is padding, as in Qwen2's own checkpoints.
VOCABULARY = {"1.5b": 151_936, "0.5b": 151_936, "tiny": 1024}


def shapes(config: Qwen2Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order of the layers."""
    width, inner = config.hidden_size, config.intermediate_size
    key = width // config.num_attention_heads * config.num_key_value_heads
    yield "model.embed_tokens.weight", (config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", width), ("k", key), ("v", key)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, width)
            yield f"{prefix}self_attn.{name}_proj.bias", (rows,)
        yield f"{prefix}self_attn.o_proj.weight", (width, width)
        yield f"{prefix}mlp.gate_proj.weight", (inner, width)
        yield f"{prefix}mlp.up_proj.weight", (inner, width)
        yield f"{prefix}mlp.down_proj.weight", (width, inner)
        yield f"{prefix}input_layernorm.weight", (width,)
        yield f"{prefix}post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norm weights are one, biases zero, matrices normal with variance 1 / inputs."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 1 / math.sqrt(shape[1]), generator=generator)


def shards(config: Qwen2Config, limit: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The tensors in runs of at most `limit` bytes; a larger tensor stands alone."""
    runs: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    held = 0
    for name, shape in shapes(config):
        size = 2 * math.prod(shape)
        if runs[-1] and held + size > limit:
            runs.append([])
            held = 0
        runs[-1].append((name, shape))
        held += size
    return runs


def write(out: Path, config: Qwen2Config, *, shard_bytes: int, seed: int) -> int:
    """Write the directory and return the number of parameters."""
    out.mkdir(parents=True)
    config.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_lm.load() / name, out / name)
    generator = torch.Generator().manual_seed(seed)
    runs = shards(config, shard_bytes)
    places, parameters = {}, 0
    for number, run in enumerate(runs, 1):
        file = f"model-{number:05d}-of-{len(runs):05d}.safetensors"
        save_file({n: draw(n, s, generator) for n, s in run}, out / file, metadata={"format": "pt"})
        places |= {n: file for n, _ in run}
        parameters += sum(math.prod(s) for _, s in run)
        print(f"{file}: {len(run)} tensors", flush=True)
    index = {"metadata": {"total_size": 2 * parameters, "total_parameters": parameters}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return parameters


def main() -> None:
    """Write it and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    parser.add_argument("--preset", choices=PRESETS, default="1.5b")
    parser.add_argument("--layers", type=int, help="instead of the preset's number of layers")
    parser.add_argument("--shard-mb", type=int, default=512, help="largest shard; a larger tensor has its own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists: give a new directory")

    torch.set_num_threads(1)
    shape = PRESETS[options.preset]
    if options.layers:
        shape = shape | {"num_hidden_layers": options.layers}
    config = Qwen2Config(
        vocab_size=VOCABULARY[options.preset],
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        architectures=["Qwen2ForCausalLM"],
        **shape,
    )
    parameters = write(options.out, config, shard_bytes=options.shard_mb << 20, seed=options.seed)
    print(f"{parameters:,} parameters in {options.out}")


if __name__ == "__main__":
    main()
