"""Progress on standard error, where a person watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from assay.core.progress import Progress, silent


@contextmanager
def shown(quiet: bool = False) -> Iterator[Progress]:
    """A progress line while the block runs; nothing where standard error is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    with Bars(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bars:
        task = bars.add_task("starting", total=None)

        def advance(done: float, total: float | None, what: str) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield advance
