"""The catalogue as data: one row per method, read from `catalogue.toml` without importing torch."""

from __future__ import annotations

import difflib
import importlib
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from assay.core.errors import InputError

FAMILIES = {
    "lens": "see inside a trained network",
    "guard": "watch, audit, steer and edit behaviour",
    "compress": "make it smaller",
    "trust": "know when to believe an output, a judge, a risk",
    "posttrain": "improve a model with few or no labels",
    "prompt": "get more out of an LLM without touching weights",
    "curate": "cluster, select, adapt and federate data",
    "models": "new models, layers and learning rules",
    "control": "reinforcement learning and search",
    "vision": "images and video",
    "science": "biology, physics, microscopy",
}

SHAPES = ("measure", "estimator", "module", "rewrite", "training")


@dataclass(frozen=True)
class Method:
    """One row of the catalogue.

    Attributes:
        slug: the name on the command line.
        family: one of `FAMILIES`.
        shape: what kinds of thing it gives, from `SHAPES`.
        title: the paper's title.
        arxiv: the paper's arXiv id; `openreview:` and its id there, where it has none.
        subject: the kinds of input that it takes, as `assay.core.subject` names them.
        requires: what a checkpoint must have for it ("causal", "rotary", …), as `assay.core.subject` reads it.
        summary: one line for a user who has not read the paper.
        exports: the public names that its module gives.
    """

    slug: str
    family: str
    shape: tuple[str, ...]
    title: str
    arxiv: str
    subject: tuple[str, ...]
    requires: tuple[str, ...]
    summary: str
    exports: tuple[str, ...]

    @property
    def stem(self) -> str:
        """The slug as a Python name."""
        return self.slug.replace("-", "_")

    @property
    def module(self) -> str:
        """The module with the mathematics."""
        return f"assay.{self.family}._{self.stem}"

    @property
    def trial_module(self) -> str:
        """The module that declares the trial."""
        return f"assay.trials.{self.family}.{self.stem}"


@cache
def catalogue() -> dict[str, Method]:
    """Every method, by slug, in the order of the file."""
    text = files("assay").joinpath("catalogue.toml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = tomllib.loads(text)
    return {slug: _row(slug, row) for slug, row in rows.items()}


def _row(slug: str, row: dict[str, Any]) -> Method:
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
    return Method(slug=slug, **values)


def method(slug: str) -> Method:
    """The row of one method.

    Raises:
        InputError: no such method; names the nearest slugs.
    """
    rows = catalogue()
    if slug in rows:
        return rows[slug]
    near = difflib.get_close_matches(slug, rows, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`assay methods` lists them"
    raise InputError(f"no method is called {slug!r}: {hint}")


def lazy_family(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a family, so that importing it imports no method.

    Args:
        package: the family's package name, such as "assay.lens".
    """
    family = package.rpartition(".")[2]
    home = {name: m.module for m in catalogue().values() if m.family == family for name in m.exports}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return get, lambda: sorted(home), sorted(home)
