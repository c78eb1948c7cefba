"""Memory and time of the shrinking cache against transformers' own caches, on builtin:smollm2 and one thread.

python benchmarks/pm_kvq.py [TOKENS ...]    lengths to measure at (2048 4096 8192)

The model reads 2,048 tokens of text; every cache is then filled with their keys and values, over and over up to its
length (neither bytes nor time depend on what they are), in a process of its own, whose resident memory is read before
and after, and in which a few tokens are decoded. transformers' QuantizedCache takes part
where optimum-quanto is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import torch
from transformers import Cache, DynamicCache, QuantizedCache

from assay.compress import ProgressiveKVCache, layer_bytes
from assay.core.text import token_windows
from assay.reference import checkpoint
from assay.reference._text import sample

READ = 2048
STEP = 256
DECODED = 4


def stored(x: object) -> int:
    """Bytes of every tensor below an object, those inside of quanto's tensors included."""
    if isinstance(x, torch.Tensor):
        if type(x) is not torch.Tensor and hasattr(x, "__tensor_flatten__"):
            return sum(stored(getattr(x, name)) for name in x.__tensor_flatten__()[0])
        return x.untyped_storage().nbytes()
    return sum(map(stored, x)) if isinstance(x, list | tuple) else 0


def cache_bytes(cache: Cache) -> int:
    if isinstance(cache, ProgressiveKVCache):
        return cache.nbytes
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    return sum(stored(getattr(layer, name, None)) for layer in cache.layers for name in names)


def resident() -> int:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def in_a_child(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run in a fork, which shares the model and the keys and starts from the same memory as its siblings."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writer, "w") as stream:
                try:
                    json.dump(measure(), stream)
                except Exception as error:
                    json.dump({"error": f"{type(error).__name__}: {error}"}, stream)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process was ended"}


@torch.no_grad()
def filled(model: Any, kept: list[tuple[torch.Tensor, torch.Tensor]], tokens: int, make: Callable[[], Cache]) -> dict:
    cache = make()
    before = resident()
    start = time.perf_counter()
    for at in range(0, tokens, STEP):
        piece = slice(at % READ, at % READ + min(STEP, tokens - at))
        for layer, (keys, values) in enumerate(kept):
            cache.update(keys[:, :, piece], values[:, :, piece], layer)
    fill = time.perf_counter() - start
    held, grown = cache_bytes(cache), resident() - before
    codes = cache.code_bytes if isinstance(cache, ProgressiveKVCache) else None
    token = torch.full((1, 1), 42)
    start = time.perf_counter()
    for _ in range(DECODED):
        model(token, past_key_values=cache)
    return {
        "held": held,
        "grown": grown,
        "codes": codes,
        "fill": fill,
        "token": (time.perf_counter() - start) / DECODED,
    }


@torch.no_grad()
def main(lengths: list[int]) -> None:
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    opened = checkpoint("builtin:smollm2")
    model: Any = opened.load(torch.float32).eval()
    config = model.config
    ids = token_windows(opened.tokenizer(), [sample("prose")], tokens=READ, context=READ).input_ids
    plain = DynamicCache(config=config)
    for piece in ids.split(STEP, dim=1):
        model.model(piece, past_key_values=plain)
    kept = [(layer.keys, layer.values) for layer in plain.layers]
    quanto = importlib.util.find_spec("optimum") is not None and importlib.util.find_spec("optimum.quanto") is not None
    if not quanto:
        print("optimum-quanto is not installed: no comparison with QuantizedCache")

    print(f"{'tokens':>6}  {'cache':28} {'held MiB':>9} {'codes MiB':>9} {'RSS MiB':>8} {'fill s':>7} {'ms/token':>8}")
    for tokens in lengths:
        n = config.num_hidden_layers
        arms: dict[str, Callable[[], Cache]] = {
            "DynamicCache, float32": lambda: DynamicCache(config=config),
            "shrinking, no limit (16 bit)": lambda n=n: ProgressiveKVCache(config, [float("inf")] * n),
        }
        for bits in (8, 4, 2):
            budget = layer_bytes(config, tokens + DECODED, bits)
            arms[f"shrinking, room for {bits} bit"] = lambda budget=budget, n=n: ProgressiveKVCache(
                config, [budget] * n
            )
        if quanto:
            for bits in (4, 2):
                arms[f"QuantizedCache quanto, {bits} bit"] = lambda bits=bits: QuantizedCache(
                    "quanto", config, nbits=bits
                )
        for name, make in arms.items():
            found = in_a_child(lambda make=make, tokens=tokens: filled(model, kept, tokens, make))
            if "error" in found:
                print(f"{tokens:6}  {name:28} {found['error'][:80]}", flush=True)
                continue
            codes = "–" if found["codes"] is None else f"{found['codes'] / 2**20:.1f}"
            print(
                f"{tokens:6}  {name:28} {found['held'] / 2**20:9.1f} {codes:>9} {found['grown'] / 2**20:8.1f} "
                f"{found['fill']:7.1f} {1e3 * found['token']:8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [2048, 4096, 8192])
