"""Time and memory of all twelve head scores against a plain eager forward pass and against whole patterns.

    python benchmarks/inactive_heads.py [--tokens 1024] [--layers 8] [--width 512] [--repeats 5]

Each contestant runs in a process of its own, on one thread. The peer is what one writes without assay: Hugging Face's
`output_attentions=True` with hooks on the projections, and the scores from the patterns that it returns.
"""

import argparse
import multiprocessing
import resource
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaModel

from assay.core.trace import Reducer, trace
from assay.lens import _inactive_heads as lens


def build(args):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 128,
        max_position_embeddings=args.tokens,
    )
    model = LlamaModel(config).eval()
    model.set_attn_implementation("eager")
    return model, torch.randint(1000, (1, args.tokens))


def plain(model, ids):
    model(ids, use_cache=False)


def whole_patterns(model, ids):
    seen, hooks = [], []
    for block in model.layers:
        attention = block.self_attn
        hooks.append(attention.v_proj.register_forward_hook(lambda _m, _a, o: seen.append([o])))
        hooks.append(attention.o_proj.register_forward_pre_hook(lambda _m, a: seen[-1].append(a[0])))
    out = model(ids, output_attentions=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    scores = []
    for pattern, (v, o) in zip(out.attentions, seen, strict=True):
        o = o.unflatten(-1, (pattern.shape[1], -1))
        v = v.unflatten(-1, (-1, o.shape[-1]))
        v = v.repeat_interleave(pattern.shape[1] // v.shape[2], dim=2)
        norms_o, norms_v = o.norm(dim=-1), v.norm(dim=-1)
        base = [
            pattern[..., 0].mean(-1),
            torch.special.entr(pattern).sum(-1).mean(-1),
            norms_v[:, 0],
            norms_v.mean(1),
            norms_o[:, -1],
            norms_o.mean(1),
        ]
        scores.append(torch.stack([*base, *(b / b.mean(-1, keepdim=True) for b in base)]))
    return torch.stack(scores)


class _Nothing(Reducer):
    sites = ("attn.pattern", "attn")

    def update(self, site, layer, value, batch):
        return None


CONTESTANTS = {
    "plain eager forward": plain,
    "whole patterns (Hugging Face)": whole_patterns,
    "assay, pass alone": lambda model, ids: trace(model, [ids], [_Nothing()]),
    "assay, 12 scores": lambda model, ids: lens.inactive_heads(model, [ids]),
    "assay, ahon_ln": lambda model, ids: lens.inactive_heads(model, [ids], which=("ahon_ln",)),
}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name, args, queue):
    model, ids = build(args)
    run = CONTESTANTS[name]
    with torch.no_grad():
        model(ids[:, :16])
        before = peak()
        seconds = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            run(model, ids)
            seconds.append(time.perf_counter() - start)
    queue.put((statistics.median(seconds), peak() - before))


def main():
    parser = argparse.ArgumentParser()
    for option, value in {"tokens": 1024, "layers": 8, "width": 512, "repeats": 5}.items():
        parser.add_argument(f"--{option}", type=int, default=value)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    figures = {}
    for name in CONTESTANTS:
        queue = context.Queue()
        process = context.Process(target=measure, args=(name, args, queue))
        process.start()
        figures[name] = queue.get()
        process.join()
    reference = figures["plain eager forward"][0]
    print(f"{args.layers} layers, width {args.width}, {args.tokens} tokens, one thread")
    for name, (seconds, memory) in figures.items():
        print(f"{name:30} {seconds * 1e3:8.1f} ms  {seconds / reference:5.2f}×  peak +{memory:6.0f} MiB")


if __name__ == "__main__":
    main()
