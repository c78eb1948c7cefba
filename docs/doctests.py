"""Shows the doctests of docstrings as code, wherever in the docstring they stand."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^( *)>>> .*\n(?:\1.*\S.*\n?)*", re.MULTILINE)


def fenced(text: str) -> str:
    """The docstring with a fence around each doctest, which ends at an empty line."""
    return _DOCTEST.sub(lambda m: f"{m[1]}```pycon\n{m[0].rstrip()}\n{m[1]}```\n", text)


class Doctests(griffe.Extension):
    """Fences doctests before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute once it is read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
