"""The progress line: nothing where nobody watches; phases, and the time left, where somebody does."""

import io
import sys

import pytest

from assay.cli import _progress
from assay.core.progress import silent


class Terminal(io.StringIO):
    def isatty(self):
        return True


def watch(monkeypatch):
    """Let standard error be a terminal; called by the test, since capturing puts back what a fixture sets."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())


def test_nothing_where_nobody_watches(monkeypatch):
    watch(monkeypatch)
    with _progress.shown(quiet=True) as progress:
        assert progress is silent
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with _progress.shown() as progress:
        assert progress is silent


def test_the_time_left_is_told_from_slow_steps_and_anew_for_every_phase(monkeypatch):
    watch(monkeypatch)
    from rich import progress as rich_progress

    clock = [0.0]
    made = []
    plain = rich_progress.Progress.__init__

    def watched(self, *args, **kwargs):
        plain(self, *args, **kwargs, get_time=lambda: clock[0])
        made.append(self)

    monkeypatch.setattr(rich_progress.Progress, "__init__", watched)
    with _progress.shown() as progress:
        task = made[0].tasks[0]
        progress(0, None, "load")
        assert task.time_remaining is None
        for block in range(4):
            progress(block, 10, "blocks")
            clock[0] += 100.0
        assert (task.description, task.completed, task.total) == ("blocks", 3, 10)
        assert task.time_remaining == pytest.approx(7 * 100, rel=0.2)
        progress(0, 5, "measure")
        assert (task.description, task.completed, task.total) == ("measure", 0, 5)
        assert task.time_remaining is None
