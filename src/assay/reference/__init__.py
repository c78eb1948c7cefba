"""Built-in subjects with known ground truth.

Each is one module here with `KIND` (a subject kind), `ABOUT` (one line) and `load(**options)`. A checkpoint's `load`
returns the path of its directory or file; a generator's `load(seed=0, …)` returns arrays.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from assay.core.errors import InputError

PREFIX = "builtin:"


def names() -> list[str]:
    """The names of the built-in subjects, without the prefix."""
    return sorted(
        m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")
    )


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
