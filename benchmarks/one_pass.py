"""One forward pass that serves nerve, inactive-heads and rope-heads, against a plain pass and TransformerLens' cache.

    python benchmarks/one_pass.py [--tokens 2048] [--context 512] [--peer]

Every contestant runs in a process of its own. `--peer` needs `pip install transformer-lens`, which downloads a good deal;
it is given the same weights, and what the three lenses found is compared with the same formulas on its cache.
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
from assay.lens import (
    HeadScoreReducer,
    NerveReducer,
    RopeHeadsReducer,
    block_swap_scores,
    head_scores,
    spectrum_metrics,
)
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


def bridge(model):
    from transformer_lens.model_bridge.bridge import TransformerBridge

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        tokenizer = Checkpoint(builtin("smollm2").load()).tokenizer()
        return TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer, device="cpu")


def differences(model, ids):
    """The largest difference, relative to the largest value, between each figure of ours and the cache's."""
    nerve, heads, rope = (reducer.result() for reducer in lenses(model, ids))
    theta = anatomy(model).blocks[0].attention.rotary.inv_freq
    _, cache = bridge(model).run_with_cache(ids)
    theirs = {}
    for layer in nerve.layers:
        at = f"blocks.{layer}"
        pre, post = (
            spectrum_metrics(cache[f"{at}.mlp.{hook}"].flatten(0, 1)) for hook in ("gate.hook_out", "out.hook_in")
        )
        q, k, v = (cache[f"{at}.attn.hook_{x}"].transpose(1, 2) for x in "qkv")
        scores = head_scores(cache[f"{at}.attn.hook_pattern"], v)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        swaps = block_swap_scores(q[:, :, -1], k, theta=theta, keep_first=1)
        found = {
            f"nerve {n} {side}": getattr(m, n)
            for n in ("se", "pr", "eee")
            for side, m in (("pre", pre), ("post", post))
        }
        found |= {f"inactive-heads {n}": scores[n] for n in heads.scores}
        found |= {f"rope-heads {n}": getattr(swaps, n).mean(0) for n in ("pos", "sym", "moved", "entropy", "distance")}
        for name, value in found.items():
            theirs.setdefault(name, []).append(value)
    ours = {
        f"nerve {n} {side}": getattr(getattr(nerve, side), n) for n in ("se", "pr", "eee") for side in ("pre", "post")
    }
    ours |= {f"inactive-heads {n}": heads[n].transpose(0, 1) for n in heads.scores}
    ours |= {f"rope-heads {n}": getattr(rope, n) for n in ("pos", "sym", "moved", "entropy", "distance")}
    return {
        name: float((torch.stack(theirs[name]) - value).abs().max() / value.abs().max()) for name, value in ours.items()
    }


def compare(args, answer):
    answer.put(json.dumps(differences(*load(args))))


def contestant(name, args, answer):
    model, ids = load(args)
    run = {"plain": plain, "plain, one batch": plain_batched, "three lenses": lenses}.get(name)
    if run is None:
        peer = bridge(model)

        def run(_model, ids):
            return peer.run_with_cache(ids)

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


def in_a_process(function, *args):
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=function, args=(*args, answer))
    process.start()
    got = json.loads(answer.get())
    process.join()
    return got


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="also TransformerLens")
    args = parser.parse_args()
    names = ["plain", "plain, one batch", "three lenses"] + (["TransformerLens cache"] if args.peer else [])
    base = None
    for name in names:
        got = in_a_process(contestant, name, args)
        base = base or got["seconds"]
        print(
            f"{name:<24} {got['seconds']:7.2f} s   {got['seconds'] / base:5.2f}×   peak + {got['peak'] / 2**20:7.0f} MiB"
        )
    if args.peer:
        print("largest relative difference from the same formulas on the cache:")
        for name, value in in_a_process(compare, args).items():
            print(f"{name:<28} {value:.1e}")


if __name__ == "__main__":
    main()
