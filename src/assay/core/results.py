"""Typed results: a frozen dataclass per method, with a table, a figure and a JSON form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure


def jsonable(value: Any) -> Any:
    """Turn results into what JSON can hold: arrays and tensors to lists, NaN and infinities to None.

    Args:
        value: anything made of dataclasses, mappings, sequences, arrays, tensors, numbers and strings.

    Raises:
        TypeError: for an object of another kind, naming its type.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Result):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(v) for v in value]
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if hasattr(value, "detach"):
        detached = value.detach().cpu()
        if detached.dtype.is_floating_point:
            detached = detached.double()
        return jsonable(detached.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form")


@dataclass(frozen=True)
class Column:
    """One column of a table: its name, its unit ("" when it has none) and what it means."""

    name: str
    unit: str = ""
    about: str = ""

    @property
    def heading(self) -> str:
        """The name with its unit in brackets."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Table:
    """A small table of results that prints itself, and turns into records or a DataFrame.

    Args:
        columns: what stands in each column.
        rows: one tuple a row, as long as `columns`.
        title: a line above the table.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} values in a table of {len(self.columns)} columns")

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def records(self) -> list[dict[str, Any]]:
        """One mapping a row, JSON-ready."""
        return [{c.name: jsonable(v) for c, v in zip(self.columns, row, strict=True)} for row in self.rows]

    def to_pandas(self) -> pd.DataFrame:
        """The same as a pandas DataFrame (needs pandas)."""
        import pandas

        return pandas.DataFrame(self.records(), columns=[c.name for c in self.columns])

    def formatted(self) -> list[list[str]]:
        """Every cell as text, numbers at four significant digits."""
        return [[format_value(v) for v in row] for row in self.rows]

    def __str__(self) -> str:
        heads = [c.heading for c in self.columns]
        cells = self.formatted()
        widths = [max(len(h), *(len(r[i]) for r in cells)) if cells else len(h) for i, h in enumerate(heads)]
        numbers = (int, float, np.number, type(None))
        numeric = [all(isinstance(r[i], numbers) for r in self.rows) for i in range(len(heads))]

        def line(parts: Sequence[str]) -> str:
            return "  ".join(
                p.rjust(w) if n else p.ljust(w) for p, w, n in zip(parts, widths, numeric, strict=True)
            ).rstrip()

        body = [line(heads), line(["-" * w for w in widths]), *(line(r) for r in cells)]
        return "\n".join([self.title, *body] if self.title else body)


def format_value(value: Any) -> str:
    """A cell as text: four significant digits, "–" for what is missing."""
    if value is None:
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float | np.floating):
        if math.isnan(value):
            return "–"
        if value != 0 and (abs(value) >= 1e6 or abs(value) < 1e-3):
            return f"{value:.3g}"
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int | np.integer):
        return f"{value:,}" if abs(int(value)) >= 10_000 else str(value)
    return str(value)


class Result:
    """Base of the frozen dataclasses that measures and rewrites return.

    A subclass states the unit and shape of each field in its docstring and gives `table` and `figure`.
    """

    def table(self) -> Table:
        """The result as a table."""
        raise NotImplementedError

    def figure(self) -> Figure:
        """The result as an interactive Plotly figure."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON types."""
        return {f.name: jsonable(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
