"""Results in the terminal, a screen at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from assay.core.results import Column, Table, format_value
from assay.core.stats import Interval
from assay.examine import Examination

if TYPE_CHECKING:
    from assay.compressor import Compression
    from assay.trials import TrialRun, Verdict

_MARKS = {"warning": ("!", "bold red"), "note": ("•", "cyan"), "good": ("✓", "green")}
_WORDS = {"better": "green", "worse": "red"}


def print_examination(examination: Examination, console: Console | None = None) -> None:
    """The model in a line, the findings with their figures and commands, and what was left out."""
    console = console or _console()
    m = examination.model
    shape = [f"{m.parameters / 1e6:,.1f} M parameters"]
    if m.n_layers is not None:
        shape.append(f"{m.n_layers} layers × {m.n_heads} heads")
    shape.append(f"{m.stored_dtype} on disk, run in {m.dtype}")
    console.print(Text.assemble((m.name, "bold"), f"  {m.architecture}, {', '.join(shape)}"))
    s = examination.settings
    if s["tokens"]:
        console.print(f"{s['tokens']:,} tokens of text in windows of {s['context']}, level {s['level']}\n")
    else:
        console.print(f"level {s['level']}\n")
    for f in examination.findings:
        mark, style = _MARKS[f.level]
        console.print(Text.assemble((f"{mark} ", style), f.sentence))
        low, high = format_value(f.low), format_value(f.high)
        figure = f"{format_value(f.number)} {f.unit}".strip()
        interval = f" [{low}, {high}]" if f.low is not None else ""
        console.print(Padding(Text(f"{figure}{interval}: {f.uncertainty}", style="dim"), (0, 0, 0, 2)))
        console.print(Padding(Text(f"$ {f.command}", style="bold"), (0, 0, 0, 2)), soft_wrap=True)
    for skipped in examination.skipped:
        console.print(Text(f"– {skipped.section}: not measured, {skipped.reason}", style="dim"))
    total = sum(v for k, v in examination.seconds.items())
    console.print(Text(f"\n{total:.0f} s, peak memory {examination.peak_memory / 2**30:.2f} GiB", style="dim"))


def print_compression(compression: Compression, console: Console | None = None) -> None:
    """What was tried, before and after, and what the reader should know."""
    console = console or _console()
    c = compression
    console.print(Text.assemble((c.source, "bold"), f" → {c.out}"))
    console.print(f"{c.setting}; {len(c.layers)} layers packed, {len(c.left)} left; format {c.format}\n")
    if c.tried:
        console.print(_grid(c.tried_table()))
        console.print()
    console.print(_grid(c.table()))
    noted = [layer for layer in c.layers if layer.note]
    for layer in noted[:3]:
        console.print(Text(f"! {layer.name}: {layer.note}", style="red"))
    if len(noted) > 3:
        console.print(Text(f"! and {len(noted) - 3} more: compression.json has them", style="red"))
    for reason in sorted(set(c.left.values())):
        names = [n for n, why in c.left.items() if why == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        console.print(Text(f"– {names[0]}{more}: {reason}", style="dim"))
    console.print(
        Text(
            f"\n{c.calibration_tokens:,} tokens to calibrate, {c.held_tokens:,} to measure; {c.seconds:.0f} s, peak memory "
            f"{c.peak_memory / 2**30:.2f} GiB",
            style="dim",
        )
    )


def print_trial(run: TrialRun, console: Console | None = None) -> None:
    """The question, the arms, the verdict and the cost."""
    console = console or _console()
    verdict = run.verdict
    console.print(Text(verdict.question, style="bold"))
    console.print(f"{verdict.slug} on {verdict.source}, budget {verdict.budget}, {len(verdict.seeds)} seeds\n")
    for table in (_arms(verdict), _comparisons(verdict), _costs(verdict)):
        if len(table):
            console.print(_grid(table))
            console.print()
    for arm in verdict.arms:
        for failure in arm.failures:
            console.print(Text(f"{arm.name} failed: {failure}", style="red"))
    console.print(Text(verdict.sentence(), style="bold"))


def _console() -> Console:
    """The terminal; where the output goes elsewhere, lines are as wide as tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _arms(verdict: Verdict) -> Table:
    """The means; intervals and seeds stand on the page."""
    columns = (
        Column("arm"),
        *(Column(m.name, m.unit) for m in verdict.metrics),
        Column("time", "s"),
        Column("memory", "MiB"),
    )
    rows = tuple(
        (a.name, *(i.mean if (i := a.intervals[m.name]) else None for m in verdict.metrics), a.seconds, a.peak_mib)
        for a in verdict.arms
    )
    return Table(columns, rows)


def _comparisons(verdict: Verdict) -> Table:
    rows = tuple(
        (c.metric, c.baseline, _interval(c.difference), c.word) for c in verdict.comparisons if c.word != "not judged"
    )
    return Table((Column("metric"), Column("against"), Column("difference", "95 %"), Column("verdict")), rows)


def _costs(verdict: Verdict) -> Table:
    rows = tuple((c.baseline, _interval(c.time_ratio), _interval(c.memory_ratio)) for c in verdict.costs)
    return Table((Column("against"), Column("time", "×"), Column("memory", "×")), rows)


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return format_value(None)
    return f"{format_value(interval.mean)} [{format_value(interval.low)}, {format_value(interval.high)}]"


def _grid(table: Table) -> Grid:
    grid = Grid(title=table.title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(table.columns):
        numbers = all(isinstance(row[i], int | float | None) for row in table.rows)
        grid.add_column(column.heading, justify="right" if numbers else "left", overflow="fold")
    for row in table.formatted():
        grid.add_row(*(Text(cell, style=_WORDS.get(cell, "")) for cell in row))
    return grid
