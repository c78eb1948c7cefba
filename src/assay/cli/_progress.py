"""Progress on standard error, where a person watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from assay.core.progress import Progress, silent

_DAY = 86400.0


@contextmanager
def shown(quiet: bool = False) -> Iterator[Progress]:
    """A progress line while the block runs; nothing where standard error is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    with Bars(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        # One step can take minutes: the time left is told from all of them.
        speed_estimate_period=_DAY,
    ) as bars:
        task = bars.add_task("starting", total=None)
        now = ""

        def advance(done: float, total: float | None, what: str) -> None:
            nonlocal now
            if what != now:
                # Steps of another kind take another time.
                bars.reset(task, total=total, completed=int(done), description=what)
                now = what
            else:
                bars.update(task, completed=done, total=total)

        yield advance
