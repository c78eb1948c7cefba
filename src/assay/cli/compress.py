"""`assay compress`: a smaller checkpoint, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from assay.core.errors import InputError


def compress(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face directory, a .gguf, or builtin:NAME.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory for the new model; it must not exist yet.")],
    method: Annotated[str | None, typer.Option(help="gptq, rtn, obr, bof4 or logart; gptq by default.")] = None,
    bits: Annotated[int | None, typer.Option(help="Bits of a weight's code; 4 by default.")] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale, 0 for whole rows; 64 by default.")
    ] = None,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="Store a zero point with each scale (gptq and rtn).")
    ] = False,
    sparsity: Annotated[
        float | None, typer.Option(help="Share of the weights that obr prunes; 0.5 by default.")
    ] = None,
    pattern: Annotated[str | None, typer.Option(help="2:4 and the like, in place of --sparsity.")] = None,
    fit: Annotated[
        float | None, typer.Option(metavar="BITS_PER_WEIGHT", help="Search methods and settings for this size.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to calibrate on: plain, JSONL or Parquet; a built-in sample by default.")
    ] = None,
    held: Annotated[
        Path | None, typer.Option(help="Text to measure on; by default what calibration leaves of --text.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Windows to calibrate on.")] = 64,
    context: Annotated[
        int | None, typer.Option(help="Tokens in a window; 512 by default, or what the model takes.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Layers to leave: a whole name, that of a part, or a name's last piece. May be repeated."),
    ] = None,
    base: Annotated[Path | None, typer.Option(help="The base model of a LoRA adapter.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read .bin weights too, with weights_only=True.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print compression.json instead of the summary.")] = False,
) -> None:
    """Write a smaller checkpoint that loads where the original did, and measure what it cost."""
    from assay.cli._progress import shown
    from assay.core.output import write_text

    chosen = (method, bits, group_size, sparsity, pattern, asymmetric or None)
    if fit is not None and any(v is not None for v in chosen):
        raise InputError(
            "--fit chooses the settings itself: leave out --method, --bits, --group-size, --asymmetric, --sparsity and "
            "--pattern"
        )
    method = method or "gptq"
    with shown() as progress:
        from assay.compressor import Setting, compress_checkpoint

        given: dict[str, Any] = {"text": text, "held": held, "samples": samples, "context": context}
        given |= {"skip": ("lm_head", *(skip or ())), "base": base, "allow_pickle": allow_pickle, "progress": progress}
        if fit is not None:
            from assay.compressor import fit_checkpoint

            result = fit_checkpoint(model, out, fit, **given)
        else:
            if method == "logart" and group_size:
                raise InputError("--group-size does not go with --method logart, which has one scale a row")
            size = None if group_size == 0 else 64 if group_size is None else group_size
            bits = 4 if bits is None else bits
            setting = Setting(method, bits, size, not asymmetric, sparsity, pattern)  # type: ignore[arg-type]
            result = compress_checkpoint(model, out, setting, **given)
    from assay import report

    write_text(out / "report.html", report.compression_page(result))
    if as_json:
        typer.echo((out / "compression.json").read_text(encoding="utf-8"), nl=False)
        return
    report.print_compression(result)
