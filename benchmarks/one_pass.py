"""One forward pass that serves nerve, inactive-heads and rope-heads, against a plain pass and TransformerLens' cache.

    python benchmarks/one_pass.py [--tokens 2048] [--context 512] [--peer]

Every contestant runs in a process of its own. `--peer` needs `pip install transformer-lens`, which downloads a good deal;
it is given the same weights, and the head outputs and patterns of its cache are compared with ours.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import psutil
import torch

from assay.core.anatomy import anatomy
from assay.core.checkpoint import Checkpoint
from assay.core.text import token_windows
from assay.core.trace import trace
from assay.lens import HeadScoreReducer, NerveReducer, RopeHeadsReducer
from assay.reference import builtin
from assay.reference._text import sample


def load(args):
    torch.set_grad_enabled(False)
    checkpoint = Checkpoint(builtin("smollm2").load())
    model = checkpoint.load(torch.float32)
    model.set_attn_implementation("eager")
    windows = token_windows(checkpoint.tokenizer(), [sample()], tokens=args.tokens, context=args.context)
    return model, windows.input_ids


def plain(model, ids):
    for row in ids:
        model(row[None], use_cache=False)


def plain_batched(model, ids):
    model(ids, use_cache=False)


def lenses(model, ids):
    found = anatomy(model)
    reducers = [NerveReducer(found), HeadScoreReducer(), RopeHeadsReducer()]
    trace(model, list(ids.split(1)), reducers, anatomy=found)
    return reducers


def contestant(name, args, answer):
    model, ids = load(args)
    run = {"plain": plain, "plain, one batch": plain_batched, "three lenses": lenses}.get(name)
    if run is None:
        from transformer_lens.model_bridge.bridge import TransformerBridge

        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            tokenizer = Checkpoint(builtin("smollm2").load()).tokenizer()
            bridge = TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer, device="cpu")

        def run(_model, ids):
            return bridge.run_with_cache(ids)

    run(model, ids[:1, :64])
    resting = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        kept = run(model, ids)
        times.append(time.perf_counter() - start)
        del kept
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024 - resting
    answer.put(json.dumps({"seconds": min(times), "peak": peak}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()
    names = ["plain", "plain, one batch", "three lenses"] + (["TransformerLens cache"] if args.peer else [])
    context = multiprocessing.get_context("spawn")
    base = None
    for name in names:
        answer = context.Queue()
        process = context.Process(target=contestant, args=(name, args, answer))
        process.start()
        got = json.loads(answer.get())
        process.join()
        base = base or got["seconds"]
        print(
            f"{name:<24} {got['seconds']:7.2f} s   {got['seconds'] / base:5.2f}×   peak + {got['peak'] / 2**20:7.0f} MiB"
        )


if __name__ == "__main__":
    main()
