"""Perplexity, size, time and memory of `assay compress` on a real model, setting by setting.

    python benchmarks/compress.py --text CALIBRATION.txt --held TEST.txt [--also OTHER.txt] [--model builtin:smollm2]
        [--only gptq,obr] [--fit 3.5]

Calibrates on 64 windows of 512 tokens of the first text and measures on 32 windows of the second, and of the third where
one is given. Every setting runs in a process of its own.
"""

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path

from assay.compressor import Setting

SETTINGS = {
    "rtn": Setting("rtn"),
    "gptq": Setting("gptq"),
    "gptq-asymmetric": Setting("gptq", symmetric=False),
    "gptq-3": Setting("gptq", 3),
    "bof4": Setting("bof4"),
    "logart": Setting("logart"),
    "obr": Setting("obr"),
    "obr-2:4": Setting("obr", pattern="2:4"),
}


def run(args, name, answer):
    from assay.compressor import compress_checkpoint, fit_checkpoint
    from assay.compressor._run import measure_loss, read_again
    from assay.core.anatomy import anatomy
    from assay.core.progress import silent
    from assay.core.text import read_texts, token_windows
    from assay.reference import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        given = {"text": args.text, "held": args.held}
        if name == "fit":
            result = fit_checkpoint(args.model, out, args.fit, **given)
        else:
            result = compress_checkpoint(args.model, out, SETTINGS[name], **given)
        row = {
            "name": name,
            "before": result.before.loss.perplexity,
            "after": result.after.loss.perplexity,
            "kl": result.drift.kl.mean,
            "bits": result.after.bits_per_weight,
            "megabytes": result.after.bytes / 1e6,
            "seconds": result.seconds,
            "gib": result.peak_memory / 2**30,
            "tried": [(t.name, t.bits_per_weight, t.kl_calibration, t.perplexity) for t in result.tried],
        }
        if args.also:
            original = checkpoint(args.model)
            windows = token_windows(original.tokenizer(), read_texts(args.also), tokens=32 * 512, context=512).input_ids
            again = read_again(out, original.load())
            row["also"] = measure_loss(again, anatomy(again), windows, silent).perplexity
    answer.put(json.dumps(row))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--held", type=Path, required=True)
    parser.add_argument("--also", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--fit", type=float)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(SETTINGS)
    context = multiprocessing.get_context("spawn")
    print(f"{'setting':<16} {'bits':>6} {'perplexity':>10} {'other text':>10} {'KL':>7} {'MB':>6} {'s':>6} {'GiB':>5}")
    for name in names + (["fit"] if args.fit else []):
        answer = context.Queue()
        process = context.Process(target=run, args=(args, name, answer))
        process.start()
        row = json.loads(answer.get())
        process.join()
        print(
            f"{row['name']:<16} {row['bits']:6.3f} {row['after']:10.2f} {row.get('also', float('nan')):10.2f} {row['kl']:7.4f} "
            f"{row['megabytes']:6.1f} {row['seconds']:6.0f} {row['gib']:5.2f}   (original {row['before']:.2f})",
            flush=True,
        )
        for tried in row["tried"]:
            print("    tried: {:<28} {:.3f} bits, KL {:.4f} on calibration text, perplexity {:.2f}".format(*tried))


if __name__ == "__main__":
    main()
