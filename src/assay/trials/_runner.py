"""Runs a trial: every arm on every seed in a process of its own, measured, recorded as it finishes, resumable."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import psutil

from assay.core.catalogue import catalogue, method
from assay.core.errors import AssayError, InputError, NotApplicable
from assay.core.output import MARKER, claim_directory, write_text
from assay.core.progress import Progress, silent
from assay.core.results import Result, Table, jsonable
from assay.core.subject import applies, recognise
from assay.trials._trial import Trial
from assay.trials._verdict import Cell, Verdict, judge
from assay.trials._worker import load_trial

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_POLL_SECONDS = 0.02
# What messages call a part of the header, where its key would not do.
_CALLED = {"code": "version of its code"}
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@dataclass(frozen=True)
class TrialRun(Result):
    """A finished trial.

    Attributes:
        source: the subject, a path or a built-in name.
        workers: how many arms ran side by side; times taken with more than one are of a shared machine.
        cells: every arm on every seed, arm by arm.
        verdict: what they show together.
    """

    source: str
    workers: int
    cells: tuple[Cell, ...]
    verdict: Verdict

    def table(self) -> Table:
        """The verdict's table."""
        return self.verdict.table()

    def figure(self) -> Figure:
        """The verdict's figure."""
        return self.verdict.figure()


def run_trial(
    trial: str | Trial,
    *,
    on: str | os.PathLike[str] | None = None,
    seeds: int | None = None,
    workers: int = 1,
    budget: str = "quick",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> TrialRun:
    """Run a method against its baselines and judge.

    Every arm runs on every seed in a fresh process with one thread, so that numbers depend neither on `workers` nor
    on what ran before. Wall time and peak memory are those of the arm alone; preparing the data is not charged.

    Args:
        trial: a method's slug, or a trial that stands at the top of an importable module.
        on: the subject, a path or `builtin:NAME`; None for the trial's built-in subject.
        seeds: how many paired repetitions, with the seeds 0, 1, …; None for the budget's own number.
        workers: how many processes run side by side.
        budget: the name of the trial's budget, "quick" or "full".
        out: directory for `cells.jsonl`, to which each arm and seed is added as it finishes, and `verdict.json`;
            None to write nothing. One trial at a time may run into it, and one that ends before its first cell
            leaves it as it was.
        resume: keep what `out` has of this trial, and run what is missing or failed.
        progress: is told how many of the processes are finished.

    Returns:
        The cells and the verdict. An arm that fails is shown as such and does not end the trial.

    Raises:
        InputError: no such method, trial, subject, budget or number of seeds; or `out` holds another trial, one that
            is running, or, with `resume`, cells of other code.
        NotApplicable: the method does not apply to the subject.
        AssayError: the data could not be prepared.
    """
    module, attribute, declared = _find(trial)
    source = _subject(declared, on)
    if budget not in declared.budgets:
        raise InputError(f"no budget is called {budget!r}: choose {' or '.join(declared.budgets)}")
    seed_list = _seeds(seeds, declared, budget)
    if not isinstance(workers, int) or workers < 1:
        raise InputError(f"workers is {workers}: give a whole number from 1")
    if out is None and resume:
        raise InputError("resume needs the directory of the interrupted trial: give out too")

    keep = nullcontext() if out is None else _recording(Path(out), _header(declared, module, source, budget), resume)
    with keep as record:
        done = record.cells if record else {}
        wanted = [(a.name, s) for s in seed_list for a in declared.arms]
        missing = [key for key in wanted if key not in done or done[key].failure is not None]
        finished = {key: done[key] for key in wanted if key not in missing}
        progress(len(finished), len(wanted), "starting")
        jobs = [
            {"module": module, "attribute": attribute, "arm": a, "source": source, "seed": s, "budget": budget}
            for a, s in missing
        ]
        with closing(_run_all(jobs, workers)) as results:
            for cell in results:
                finished[cell.arm, cell.seed] = cell
                if record:
                    record.append(cell)
                progress(len(finished), len(wanted), f"{cell.arm}, seed {cell.seed}")

        cells = tuple(finished[a.name, s] for a in declared.arms for s in seed_list)
        run = TrialRun(source, workers, cells, judge(declared, cells, source=source, budget=budget, seeds=seed_list))
        if record:
            text = json.dumps(run.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
            write_text(record.verdict, text + "\n")
    return run


def _find(trial: str | Trial) -> tuple[str, str, Trial]:
    """Where a child process can import the trial from, and the trial."""
    if isinstance(trial, Trial):
        name = trial.prepare.__module__
        home = sys.modules.get(name)
        names = [k for k, v in vars(home).items() if v is trial] if home and name != "__main__" else []
        if not names:
            raise InputError(f"the trial {trial.slug!r} must stand at the top of the module that defines its prepare")
        return name, names[0], trial
    if ":" in trial:
        module, _, attribute = trial.partition(":")
    else:
        module, attribute = method(trial).trial_module, "TRIAL"
        # find_spec raises where the family's package itself is missing.
        if not importlib.util.find_spec(module.rpartition(".")[0]) or not importlib.util.find_spec(module):
            raise InputError(f"{trial} has no trial yet: `assay methods` shows which methods have one")
    return module, attribute, load_trial(module, attribute)


def _subject(trial: Trial, on: str | os.PathLike[str] | None) -> str:
    if on is None:
        return trial.builtin
    source = os.fspath(on)
    if source.startswith("builtin:"):
        from assay.reference import builtin

        kind = builtin(source).KIND
        if kind != trial.subject:
            raise NotApplicable(f"{trial.slug} is tried on {trial.subject}; {source} is {kind}")
        return source
    found = recognise(source)
    if found.kind != trial.subject:
        raise NotApplicable(f"{trial.slug} is tried on {trial.subject}; {source} is {found.kind} ({found.reason})")
    row = catalogue().get(trial.slug)
    if row is not None and found.kind in row.subject:
        fits, why = applies(row, found)
        if not fits:
            raise NotApplicable(f"{trial.slug} {why}")
    return source


def _seeds(seeds: int | None, trial: Trial, budget: str) -> range:
    n = trial.budgets[budget].get("seeds", 5) if seeds is None else seeds
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InputError(f"seeds is {n!r}: give how many repetitions to run, a whole number from 1")
    return range(n)


def _header(trial: Trial, module: str, source: str, budget: str) -> dict[str, Any]:
    """What the cells of one file have in common; another header is another trial."""
    settings = {k: v for k, v in trial.budgets[budget].items() if k != "seeds"}
    subject: Any = source
    if not source.startswith("builtin:"):
        path = Path(source).resolve()
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        subject = [str(path), *([p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files)]
    return {
        "trial": trial.slug,
        "subject": subject,
        "budget": budget,
        "settings": jsonable(settings),
        "arms": [a.name for a in trial.arms],
        "metrics": [m.name for m in trial.metrics],
        "code": _code(trial.slug, module),
    }


def _code(slug: str, module: str) -> str:
    """A fingerprint of the sources of the trial, of the method, and of what the method takes from its family."""
    names = {module}
    row = catalogue().get(slug)
    if row is not None and importlib.util.find_spec(row.module):
        family = row.module.rpartition(".")[0] + "."
        homes = {str(getattr(v, "__module__", "")) for v in vars(importlib.import_module(row.module)).values()}
        names |= {row.module, *(h for h in homes if h.startswith(family))}
    # From the file as it is now, which is what the processes of the arms will import.
    origins = [cast(str, cast(Any, importlib.util.find_spec(name)).origin) for name in sorted(names)]
    return hashlib.sha256(b"\0".join(Path(o).read_bytes() for o in origins)).hexdigest()


@contextmanager
def _recording(out: Path, header: dict[str, Any], resume: bool) -> Iterator[_Record]:
    """The record in a directory that no other process records into; without a first cell nothing is left of it."""
    new = [p for p in (out, *out.parents) if not p.exists()]
    ours = (out / MARKER).exists()
    claim_directory(out)
    with (out / MARKER).open("a") as marker:
        _hold(marker, out)
        record = _Record.open(out, header, resume)
        try:
            yield record
        finally:
            if not ours and not record.begun:
                with suppress(OSError):
                    (out / MARKER).unlink()
                    for directory in new:
                        directory.rmdir()


def _hold(marker: IO[str], out: Path) -> None:
    """Lock a file until it is closed or this process ends, however it ends.

    Systems and file systems without such locks go without.
    """
    try:
        import fcntl

        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"another trial is running into {out}: wait for its end, or choose another directory"
        ) from error
    except (ImportError, OSError):
        return


class _Record:
    """The file of finished cells: a header line, then one line a cell, each written whole and at once."""

    def __init__(self, out: Path, header: dict[str, Any], cells: dict[tuple[str, int], Cell]) -> None:
        self.path = out / "cells.jsonl"
        self.verdict = out / "verdict.json"
        self.header = header
        self.cells = cells
        self.begun = False

    @classmethod
    def open(cls, out: Path, header: dict[str, Any], resume: bool) -> _Record:
        """Read what is there, and refuse what is of another trial."""
        record = cls(out, header, {})
        if not record.path.exists():
            return record
        found, cells = cls._read(record.path)
        if found.get("trial") != header["trial"]:
            raise InputError(
                f"{out} holds the trial of {found.get('trial')}, not of {header['trial']}: choose another directory"
            )
        if resume:
            changed = [_CALLED.get(k, k) for k in header if found.get(k) != header[k]]
            if changed:
                raise InputError(
                    f"{out} holds a trial with another {' and '.join(changed)}: choose another directory, or start "
                    "over without resume"
                )
            record.cells = cells
        elif cells and not record.verdict.exists():
            raise InputError(
                f"{out} holds an unfinished trial of {header['trial']}: resume it, choose another directory, or "
                f"delete {record.path.name} there to start over"
            )
        return record

    @staticmethod
    def _read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, int], Cell]]:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        header: dict[str, Any] = {}
        cells = {}
        for number, line in enumerate(lines[:-1], 1):
            try:
                parsed = json.loads(line)
                if number == 1:
                    header = dict(parsed)
                else:
                    cell = Cell(**parsed)
                    cells[cell.arm, cell.seed] = cell
            except (ValueError, TypeError) as error:
                raise InputError(f"{path} is damaged in line {number}: delete it to start over") from error
        return header, cells

    def append(self, cell: Cell) -> None:
        """Add a cell; the first one replaces what an earlier trial left."""
        self.cells[cell.arm, cell.seed] = cell
        if self.begun:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, _line(asdict(cell)))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            return
        # Not before there is a cell: a trial that is refused for its data must not cost an earlier one's results.
        # Written anew, so that a line cut off by a kill is gone before the next one is added.
        self.verdict.unlink(missing_ok=True)
        lines = [self.header, *map(asdict, self.cells.values())]
        write_text(self.path, b"".join(map(_line, lines)).decode())
        self.begun = True


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False).encode() + b"\n"


@dataclass
class _Child:
    job: dict[str, Any]
    process: subprocess.Popen[bytes]
    reply: IO[bytes]
    log: IO[bytes]


def _run_all(jobs: list[dict[str, Any]], workers: int) -> Generator[Cell]:
    """Run the jobs, at most `workers` at once, and give each cell as it finishes."""
    waiting = list(reversed(jobs))
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_start(waiting.pop()))
            ended = [c for c in running if c.process.poll() is not None]
            if not ended:
                time.sleep(_POLL_SECONDS)
            for child in ended:
                running.remove(child)
                with child.reply, child.log, _input_of(child.process):
                    cell = _cell(child)
                yield cell
    finally:
        for child in running:
            with child.reply, child.log, _input_of(child.process):
                _end(child.process)


def _input_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _start(job: dict[str, Any]) -> _Child:
    # Files without a name: nothing is left behind even where this process is killed.
    reply, log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-c", "from assay.trials._worker import main; main()"],
        stdin=subprocess.PIPE,
        stdout=reply,
        stderr=log,
        bufsize=0,
        env=os.environ | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONHASHSEED": "0"},
        # An interrupt from the keyboard reaches this process only, which then ends its children itself.
        start_new_session=True,
    )
    request = job | {"path": sys.path}
    # A child that died at the start is told by its exit status and log.
    with suppress(BrokenPipeError):
        _input_of(process).write(json.dumps(request).encode() + b"\n")
    return _Child(job, process, reply, log)


def _cell(child: _Child) -> Cell:
    job = child.job
    try:
        reply = json.loads(_text(child.reply))
    except ValueError:
        return Cell(job["arm"], job["seed"], {}, failure=_death(child))
    if reply["stage"] == "run":
        return Cell(job["arm"], job["seed"], {}, failure=reply["message"])
    if reply["stage"] != "ok":
        what = f"{job['source']} could not be prepared (seed {job['seed']})"
        raise AssayError(reply["message"] if reply["asked"] else f"{what}: {reply['message']}")
    metrics = {k: v if math.isfinite(v) else None for k, v in reply["metrics"].items()}
    return Cell(job["arm"], job["seed"], metrics, reply["seconds"], reply["peak_mib"], reply["peak_rss_mib"])


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode("utf-8", errors="replace")


def _death(child: _Child) -> str:
    """What is known of a process that ended without a reply."""
    status = child.process.returncode
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    if status == -9:
        how += " (out of memory?)"
    lines = _text(child.log).split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return f"the process {how}" + (f": {said[-1][:200]}" if said else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
