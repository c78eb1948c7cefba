"""Weight health: values that are not finite, dead and outlying channels, rows that stand twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from assay.core.anatomy import Anatomy, Mlp
from assay.core.results import Column, Result, Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# A channel this much larger than the median one is called an outlier.
OUTLIER_RATIO = 6.0
_CHUNK = 16 << 20


@dataclass(frozen=True)
class TensorHealth:
    """What was found in one weight.

    Attributes:
        name: its name in the model.
        shape: its shape.
        not_finite: how many values are NaN or infinite.
        dead_rows: rows (output channels) that are zero throughout.
        dead_columns: columns (input channels) that are zero throughout.
        outlier_columns: columns whose norm is more than `OUTLIER_RATIO` times the median.
        largest_column: norm of the largest column over that of the median one.
        duplicate_rows: rows that equal an earlier one and are not zero.
    """

    name: str
    shape: tuple[int, ...]
    not_finite: int
    dead_rows: int
    dead_columns: int
    outlier_columns: int
    largest_column: float
    duplicate_rows: int


@dataclass(frozen=True)
class WeightHealth(Result):
    """Findings over all weights of a model.

    Attributes:
        tensors: one entry a weight.
        dead_units: hidden units of dense feed-forward layers that can pass nothing on, as (layer, unit).
        dead_heads: attention heads whose values or output weights are zero, as (layer, head).
    """

    tensors: tuple[TensorHealth, ...]
    dead_units: tuple[tuple[int, int], ...]
    dead_heads: tuple[tuple[int, int], ...]

    @property
    def not_finite(self) -> int:
        """How many values are NaN or infinite in all."""
        return sum(t.not_finite for t in self.tensors)

    def suspicious(self) -> tuple[TensorHealth, ...]:
        """The weights with anything to report, worst first."""
        found = [t for t in self.tensors if t.not_finite or t.dead_rows or t.dead_columns or t.duplicate_rows]
        found += [t for t in self.tensors if t.outlier_columns and t not in found]
        return tuple(sorted(found, key=lambda t: (-t.not_finite, -t.dead_rows - t.dead_columns, -t.largest_column)))

    def table(self) -> Table:
        """One row for each weight with anything to report."""
        columns = (
            Column("weight"),
            Column("shape"),
            Column("NaN or Inf", "values"),
            Column("dead rows"),
            Column("dead columns"),
            Column("outlier columns", "", f"norm above {OUTLIER_RATIO:g} times the median"),
            Column("largest column", "× median"),
            Column("duplicate rows"),
        )
        rows = tuple(
            (
                t.name, "×".join(map(str, t.shape)), t.not_finite, t.dead_rows, t.dead_columns,
                t.outlier_columns, t.largest_column, t.duplicate_rows,
            )
            for t in self.suspicious()
        )  # fmt: skip
        return Table(columns, rows, f"{len(self.tensors)} weights, {len(rows)} with something to report")

    def figure(self) -> Figure:
        """Largest column over the median one, by weight."""
        from plotly import graph_objects as go

        figure = go.Figure(go.Bar(x=[t.name for t in self.tensors], y=[t.largest_column for t in self.tensors]))
        figure.update_layout(yaxis_title="largest column (× median)")
        return figure


def weight_health(model: nn.Module, *, anatomy: Anatomy | None = None) -> WeightHealth:
    """Look through every weight of a model, one at a time.

    Args:
        model: any module.
        anatomy: of a model that assay knows; without it, dead units and heads are not looked for.

    >>> layer = nn.Linear(4, 3)
    >>> with torch.no_grad():
    ...     _ = layer.weight[1].zero_()
    >>> weight_health(layer).tensors[0].dead_rows
    1
    """
    tensors = tuple(_examine(name, p.detach()) for name, p in model.named_parameters())
    units: list[tuple[int, int]] = []
    heads: list[tuple[int, int]] = []
    for block in anatomy.blocks if anatomy is not None else ():
        if block.mlp is not None:
            units += [(block.index, int(u)) for u in torch.nonzero(_dead_units(block.mlp)).flatten()]
        attention = block.attention
        if attention is not None:
            values = attention.v.weight.detach().unflatten(0, (attention.n_kv_heads, -1))
            silent = (values == 0).flatten(1).all(1)
            if attention.v.bias is not None:
                silent &= (attention.v.bias.detach().view(attention.n_kv_heads, -1) == 0).all(1)
            mute = (attention.o_slices().detach() == 0).flatten(1).all(1)
            dead = silent[attention.kv_head.to(silent.device)] | mute
            heads += [(block.index, int(h)) for h in torch.nonzero(dead).flatten()]
    return WeightHealth(tensors, tuple(units), tuple(heads))


def _dead_units(mlp: Mlp) -> Tensor:
    dead = (mlp.down.weight.detach() == 0).all(0)
    for part in (mlp.up, mlp.gate):
        if part is None:
            continue
        zero = (part.weight.detach() == 0).all(1)
        if part.bias is not None:
            zero &= part.bias.detach() == 0
        origin = mlp.act(torch.zeros(1)).item() if (part is mlp.gate or mlp.gate is None) else 0.0
        if origin == 0.0:
            dead = dead | zero
    return dead


def _examine(name: str, weight: Tensor) -> TensorHealth:
    shape = tuple(weight.shape)
    matrix = weight.reshape(-1, shape[-1]) if weight.ndim >= 2 else weight.reshape(1, -1)
    columns = torch.zeros(matrix.shape[1], dtype=torch.float64)
    dead_rows = not_finite = 0
    keys = []
    # Two fixed random directions tell rows apart; rows that agree in both are compared in full.
    probe = torch.randn(matrix.shape[1], 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = max(1, _CHUNK // (8 * matrix.shape[1]))
    for part in matrix.split(step):
        values = part.to("cpu", torch.float64)
        finite = torch.isfinite(values)
        bad = int(values.numel() - finite.sum())
        if bad:
            not_finite += bad
            values = torch.where(finite, values, 0.0)
        columns += values.square().sum(0)
        alive = (values != 0).any(1)
        dead_rows += int((~alive & finite.all(1)).sum())
        if weight.ndim >= 2:
            keys.append(torch.where(alive[:, None], values @ probe, float("nan")))
    norms = columns.sqrt()
    median = float(norms.median())
    ratio = float(norms.max()) / median if median > 0 else 0.0
    wide = weight.ndim >= 2
    return TensorHealth(
        name=name,
        shape=shape,
        not_finite=not_finite,
        dead_rows=dead_rows if wide else 0,
        dead_columns=int((norms == 0).sum()) if wide else 0,
        outlier_columns=int((norms > OUTLIER_RATIO * median).sum()) if wide and median > 0 else 0,
        largest_column=ratio if wide else 0.0,
        duplicate_rows=_duplicates(matrix, torch.cat(keys).numpy()) if wide else 0,
    )


def _duplicates(matrix: Tensor, keys: np.ndarray) -> int:
    alive = np.flatnonzero(~np.isnan(keys[:, 0]))
    _, first, inverse = np.unique(keys[alive], axis=0, return_index=True, return_inverse=True)
    earlier = alive[first[inverse.ravel()]]
    again = np.flatnonzero(earlier != alive)
    if not len(again):
        return 0
    return int((matrix[alive[again]] == matrix[earlier[again]]).all(1).sum())
