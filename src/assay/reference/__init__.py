"""Built-in subjects with known ground truth.

Each is one module here with `KIND` (a subject kind), `ABOUT` (one line) and `load(**options)`. A checkpoint's `load`
returns the path of its directory or file; a generator's `load(seed=0, …)` returns arrays.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from assay.core.errors import InputError
from assay.core.subject import Subject
from assay.core.subject import recognise as recognise_path

if TYPE_CHECKING:
    from assay.core.checkpoint import Checkpoint

PREFIX = "builtin:"


def names() -> list[str]:
    """The names of the built-in subjects, without the prefix."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def builtin(name: str) -> ModuleType:
    """The module of one built-in subject, by its name with or without the prefix `builtin:`.

    Raises:
        InputError: there is none of that name; lists those that there are.
    """
    bare = name.removeprefix(PREFIX)
    if bare not in names():
        known = ", ".join(PREFIX + n for n in names())
        raise InputError(f"no built-in subject is called {bare!r}: there are {known}")
    return importlib.import_module(f"{__name__}.{bare.replace('-', '_')}")


def recognise(source: str) -> Subject:
    """Tell what a path or a built-in name holds; see `assay.core.subject.recognise`.

    Raises:
        InputError: there is nothing there, or nothing that any method takes.
    """
    if not source.startswith(PREFIX):
        return recognise_path(source)
    module = builtin(source)
    if module.KIND == "checkpoint":
        return replace(recognise_path(module.load()), source=source)
    return Subject(source, module.KIND, module.ABOUT)


def checkpoint(source: str | Path) -> Checkpoint:
    """The checkpoint behind a built-in name or a path, not yet loaded.

    Raises:
        InputError: there is no built-in subject of that name, or it is no model.
        CheckpointError: the path holds no checkpoint that can be read.
    """
    from assay.core.checkpoint import open_checkpoint

    if not str(source).startswith(PREFIX):
        return open_checkpoint(source)
    module = builtin(str(source))
    if module.KIND != "checkpoint":
        raise InputError(f"{source} is no model: it is {module.ABOUT}")
    return open_checkpoint(module.load())


def ground_truth(source: str | Path) -> dict[str, Any]:
    """What was planted in a built-in checkpoint, by name; nothing for any other subject."""
    return getattr(builtin(str(source)), "GROUND_TRUTH", {}) if str(source).startswith(PREFIX) else {}
