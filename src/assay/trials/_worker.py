"""One arm on one seed, in a process of its own that is spoken to in JSON.

The request is one line on standard input: module, attribute, arm, source, seed, budget and path (`sys.path`). The
reply goes to standard output, and what the arm prints to standard error. The process ends when standard input is
closed, so that none outlives its runner.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from assay.core.errors import AssayError
from assay.trials._trial import Trial

_MIB = 2**20
_SAMPLE_SECONDS = 0.005


def load_trial(module: str, attribute: str) -> Trial:
    """The trial object of a module.

    Raises:
        AssayError: the module holds no such trial.
    """
    trial = getattr(import_module(module), attribute, None)
    if not isinstance(trial, Trial):
        raise AssayError(f"{module} has no trial called {attribute}")
    return trial


class Peak:
    """The most resident memory of this process from `start` to `stop`, in bytes.

    Linux keeps the mark itself and lets a process set it back; elsewhere a thread looks every 5 ms.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen = 0

    def start(self) -> int:
        """Begin, and return what is resident now."""
        gc.collect()
        # Memory that was freed and not given back would hide as much of what comes. Only glibc has the call.
        with suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
        resident = int(self._process.memory_info().rss)
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return resident

    def stop(self) -> int:
        """End, and return the peak."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            return max(self._seen, int(self._process.memory_info().rss))
        status = Path("/proc/self/status").read_text()
        marks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(marks[0]) * 1024

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._seen = max(self._seen, int(self._process.memory_info().rss))


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Prepare the data, run the arm, and say what came of it: `ok`, or the stage that failed and why."""
    stage = "import"
    try:
        trial = load_trial(request["module"], request["attribute"])
        arm = trial.arm(request["arm"])
        settings = {"seed": request["seed"], "budget": trial.budgets[request["budget"]]}
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(1)
        stage = "prepare"
        data = trial.prepare(request["source"], **settings)
        stage = "run"
        return {"stage": "ok", **_timed(lambda: arm.run(data, **settings), trial)}
    except AssayError as error:
        return {"stage": stage, "message": _one_line(str(error)), "asked": True}
    except Exception as error:
        message = f"{type(error).__name__}: {_one_line(str(error))}".rstrip(": ")
        where = traceback.extract_tb(error.__traceback__)[-1]
        message += f" ({Path(where.filename).name}, line {where.lineno})"
        return {"stage": stage, "message": message, "asked": False}


def _timed(run: Callable[[], dict[str, float]], trial: Trial) -> dict[str, Any]:
    peak = Peak()
    before = peak.start()
    start = time.perf_counter()
    measured = run()
    seconds = time.perf_counter() - start
    most = peak.stop()
    missing = [m.name for m in trial.metrics if m.name not in measured]
    if missing:
        raise ValueError(f"the arm returned no {' and no '.join(missing)}")
    return {
        "metrics": {m.name: float(measured[m.name]) for m in trial.metrics},
        "seconds": seconds,
        "peak_mib": max(0, most - before) / _MIB,
        "peak_rss_mib": most / _MIB,
    }


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _end_with(descriptor: int) -> None:
    """End this process and those it started when the runner's end of a pipe is closed."""
    while os.read(descriptor, 4096):
        pass
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)


def main() -> None:
    """Serve the one request on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Both ends move away from 0 and 1: an arm that reads finds nothing, and what it prints goes to standard error.
    pipe, reply = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(pipe, 1 << 16)
        if not part:
            return
        line += part
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    request = json.loads(line)
    sys.path[:] = request["path"]
    with os.fdopen(reply, "w", encoding="utf-8") as stream:
        json.dump(measure(request), stream)
    # What the arm registered for its end is run; taking the interpreter apart afterwards would, with torch in it, take
    # a second a cell for nothing.
    atexit._run_exitfuncs()
    os._exit(0)
