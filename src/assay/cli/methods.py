"""`assay methods`: the catalogue."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from assay.core.catalogue import FAMILIES, Method, catalogue
from assay.core.errors import InputError


def methods(
    for_: Annotated[
        str | None, typer.Option("--for", metavar="PATH", help="Only what applies to this input, and why.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="Only this family.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the methods."""
    if family is not None and family not in FAMILIES:
        raise InputError(f"no family is called {family!r}: there are {', '.join(FAMILIES)}")
    rows = [m for m in catalogue().values() if family is None or m.family == family]
    if for_ is None:
        if as_json:
            typer.echo(json.dumps([asdict(m) for m in rows], indent=2, ensure_ascii=False))
        else:
            typer.echo(_by_family(rows))
        return
    from assay.core.subject import applies
    from assay.reference import recognise

    subject = recognise(for_)
    told = [(m, *applies(m, subject)) for m in rows]
    if as_json:
        fitting = [{**asdict(m), "reason": why} for m, fits, why in told if fits]
        typer.echo(json.dumps({"kind": subject.kind, "methods": fitting}, indent=2, ensure_ascii=False))
        return
    typer.echo(f"{for_}: {subject.reason}")
    fitting_rows = [(m, why) for m, fits, why in told if fits]
    if not fitting_rows:
        typer.echo("No method applies. What the others need:")
        for m, _, why in told:
            typer.echo(f"  {m.slug:<18} {why}")
        return
    for m, why in fitting_rows:
        typer.echo(f"  {m.slug:<18} {m.summary}")
        typer.echo(f"  {'':<18} applies: {why}")


def _by_family(rows: list[Method]) -> str:
    lines = []
    for name, about in FAMILIES.items():
        members = [m for m in rows if m.family == name]
        if members:
            lines.append(f"{name}: {about}")
            lines += [f"  {m.slug:<18} {m.summary}" for m in members]
    lines.append(
        "`assay try SLUG` runs a method against its baselines; `assay methods --for PATH` says what fits yours."
    )
    return "\n".join(lines)
