"""`assay try`: a method against its baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer


def try_method(
    slug: Annotated[str, typer.Argument(metavar="SLUG", help="The method, as `assay methods` lists it.")],
    on: Annotated[
        str | None, typer.Option(metavar="SUBJECT", help="A path or builtin:NAME; a built-in subject by default.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many paired repetitions.")] = None,
    workers: Annotated[int, typer.Option(help="Arms that run side by side; the numbers stay the same.")] = 1,
    budget: Annotated[Literal["quick", "full"], typer.Option(help="How much work each arm may do.")] = "quick",
    out: Annotated[Path | None, typer.Option(help="Directory for the page and the figures.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted trial stopped.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdict.json instead of the tables.")] = False,
) -> None:
    """Try a method against its baselines on your subject, and say whether it is better."""
    from assay.cli._progress import shown
    from assay.core.catalogue import method
    from assay.core.output import check_directory, claim_directory, write_text

    row = method(slug)
    place = out or Path(f"assay-try-{row.slug}")
    check_directory(place)
    with shown() as progress:
        from assay.trials import run_trial

        run = run_trial(
            row.slug, on=on, seeds=seeds, workers=workers, budget=budget, out=place, resume=resume, progress=progress
        )
    from assay import report

    claim_directory(place)
    write_text(place / "report.html", report.trial_page(run))
    if as_json:
        typer.echo(json.dumps(run.to_dict(), indent=1, ensure_ascii=False, allow_nan=False))
        return
    report.print_trial(run)
    typer.echo(f"\nThe page: {place / 'report.html'}\nThe same as data: {place / 'verdict.json'}")
