"""Progress that a caller may watch: methods report, the command line shows, nobody prints from the mathematics."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Called as work advances: `progress(done, total, what)`; `total` is None where it is not known."""

    def __call__(self, done: float, total: float | None, what: str) -> None:
        """Take note that `done` of `total` steps of `what` are finished."""


def silent(done: float, total: float | None, what: str) -> None:
    """The default: nobody watches."""
