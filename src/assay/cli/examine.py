"""`assay examine`: the check-up of one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from assay.core.errors import InputError


def examine(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face directory, a .gguf, or builtin:NAME.")],
    text: Annotated[
        Path | None, typer.Option(help="Plain text, JSONL or Parquet with a text column; a built-in sample by default.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of text to use.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a window.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for report.html and findings.json.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less text, fewer schemes: about a minute for 135M.")] = False,
    full: Annotated[bool, typer.Option("--full", help="More text, narrower intervals.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings.json instead of the summary.")] = False,
    only: Annotated[
        str | None, typer.Option(help="Only these sections, separated by commas, such as nerve,rope-heads.")
    ] = None,
    base: Annotated[Path | None, typer.Option(help="The base model of a LoRA adapter.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read .bin weights too, with weights_only=True.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of everything that is sampled.")] = 0,
) -> None:
    """Look inside a checkpoint: what is there, what is dead weight, what 4 bits would cost."""
    from assay.cli._progress import shown
    from assay.core.output import check_directory, claim_directory, write_text

    if quick and full:
        raise InputError("--quick and --full exclude each other")
    place = out or Path("assay-" + Path(model.removeprefix("builtin:")).resolve().name.removesuffix(".gguf"))
    check_directory(place)
    with shown() as progress:
        from assay.examine import examine as run

        result = run(
            model,
            text=text,
            level="quick" if quick else "full" if full else "standard",
            tokens=tokens,
            context=context,
            only=None if only is None else [s.strip() for s in only.split(",") if s.strip()],
            base=base,
            allow_pickle=allow_pickle,
            device=device,
            seed=seed,
            progress=progress,
        )
    from assay import report

    document, page = report.findings_document(result), report.examination_page(result)
    claim_directory(place)
    write_text(place / "findings.json", json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(place / "report.html", page)
    if as_json:
        typer.echo(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))
        return
    report.print_examination(result)
    typer.echo(f"\nThe whole report: {place / 'report.html'}\nThe same as data: {place / 'findings.json'}")
