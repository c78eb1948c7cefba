"""The figures of the examination page, each with the sentence that stands for it and the table behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.core.loss import LossResult
from assay.core.results import Column, Table, format_value, jsonable
from assay.examine import FourBits, HeadMap
from assay.lens import NerveResult, StabilityCurve

# Of middling lightness, so that they read on a white and on a dark ground, and told apart without red and green.
BLUE, ORANGE, TEAL, PURPLE, PINK, GREY = "#3b82c4", "#d9822b", "#2a9d8f", "#9a6dd7", "#d16ba5", "#7d8590"
COLOURS = (BLUE, ORANGE, TEAL, PURPLE, PINK, GREY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")


@dataclass(frozen=True)
class Chart:
    """One figure of the page.

    Attributes:
        key: its id in the page.
        title: above it.
        alt: what it shows, in words and numbers.
        table: the numbers behind it.
        traces, layout: for Plotly.
        choices: a select above it: label to the traces shown.
    """

    key: str
    title: str
    alt: str
    table: Table
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, list[int]] = field(default_factory=dict)

    def spec(self) -> dict[str, Any]:
        """What the page's script draws."""
        return jsonable({"traces": self.traces, "layout": self.layout, "choices": self.choices})


def _line(x: Sequence[Any], y: Sequence[Any], name: str, k: int, **more: Any) -> dict[str, Any]:
    colour = COLOURS[k % len(COLOURS)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(x),
        "y": list(y),
        "name": name,
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "symbol": SYMBOLS[k % len(SYMBOLS)], "size": 6},
    } | more


def _bars(low: Sequence[float], mean: Sequence[float], high: Sequence[float]) -> dict[str, Any]:
    def gap(a: float, b: float) -> float:
        return a - b if math.isfinite(a - b) else 0.0

    return {
        "type": "data",
        "symmetric": False,
        "array": [gap(h, m) for h, m in zip(high, mean, strict=True)],
        "arrayminus": [gap(m, v) for v, m in zip(low, mean, strict=True)],
        "thickness": 1.2,
    }


def loss_by_position(loss: LossResult) -> Chart:
    """Loss against the place in the window."""
    buckets = loss.buckets()
    names = [f"{a}–{b}" if b > a else str(a) for a, b, _ in buckets]
    first, last = buckets[0][2], buckets[-1][2]
    return Chart(
        key="loss-by-position",
        title="Loss by position in the window",
        alt=f"The mean loss goes from {first:.2f} nats a token at position {names[0]} to {last:.2f} at {names[-1]}.",
        table=loss.table(),
        traces=[_line(names, [v for *_, v in buckets], "loss", 0, showlegend=False)],
        layout={"xaxis": {"title": "position", "type": "category"}, "yaxis": {"title": "loss (nats/token)"}},
    )


def removal_cost(heads: HeadMap) -> Chart:
    """Loss change against the share of heads zeroed."""
    x = [100 * r.zeroed for r in heads.removals]
    y = [r.change.mean for r in heads.removals]
    bars = _bars([r.change.low for r in heads.removals], y, [r.change.high for r in heads.removals])
    columns = (
        Column("heads zeroed", "%"),
        Column("loss change", "nats/token"),
        Column("low", "95 %"),
        Column("high", "95 %"),
        Column("threshold"),
    )
    rows = tuple((100 * r.zeroed, r.change.mean, r.change.low, r.change.high, r.tau) for r in heads.removals)
    parts = [f"{a:.0f} % costs {format_value(b)}" for a, b in zip(x, y, strict=True)]
    return Chart(
        key="removal-cost",
        title="Loss when the least active heads are zeroed",
        alt=f"Change of the loss in nats a token by the share of heads zeroed: {', '.join(parts)}.",
        table=Table(columns, rows),
        traces=[_line(x, y, "loss change", 0, error_y=bars, showlegend=False)],
        layout={
            "xaxis": {"title": "heads zeroed (%)", "rangemode": "tozero"},
            "yaxis": {"title": "loss change (nats/token)"},
        },
    )


def spectra(nerve: NerveResult) -> Chart:
    """Participation ratio, entropy or early enrichment by layer, before and after."""
    layers = list(nerve.layers)
    parts = {
        "participation ratio (directions)": (nerve.pre.pr, nerve.post.pr),
        "spectral entropy (nats)": (nerve.pre.se, nerve.post.se),
        "early enrichment": (nerve.pre.eee, nerve.post.eee),
    }
    traces: list[dict[str, Any]] = []
    choices: dict[str, list[int]] = {}
    for name, pair in parts.items():
        choices[name] = [len(traces), len(traces) + 1]
        for k, (label, values) in enumerate(zip(("before", "after"), pair, strict=True)):
            traces.append(_line(layers, values.tolist(), label, k))
    rises = int((nerve.pr_gain > 1).sum())
    return Chart(
        key="spectra",
        title="Feed-forward activations before and after the nonlinearity",
        alt=f"The participation ratio rises at the nonlinearity in {rises} of {len(layers)} layers; its median goes from "
        f"{float(nerve.pre.pr.median()):.1f} to {float(nerve.post.pr.median()):.1f} of {nerve.width:,} directions.",
        table=nerve.table(),
        traces=traces,
        layout={"xaxis": {"title": "layer"}, "yaxis": {"rangemode": "tozero"}},
        choices=choices,
    )


def spectrum_of_layer(nerve: NerveResult) -> Chart:
    """The two spectra of one layer, which the reader picks."""
    data = nerve.to_dict()
    traces: list[dict[str, Any]] = []
    choices: dict[str, list[int]] = {}
    for i, layer in enumerate(nerve.layers):
        choices[f"layer {layer}"] = [len(traces), len(traces) + 1]
        for k, (label, part) in enumerate((("before", data["pre"]), ("after", data["post"]))):
            # Ranks beyond what the tokens can show have no share and no place on a logarithmic axis.
            shown = [(r, v) for r, v in zip(data["ranks"], part["spectrum"][i], strict=True) if v > 1e-12]
            traces.append(_line([r for r, _ in shown], [v for _, v in shown], label, k))
    columns = (Column("layer"), Column("rank"), Column("share before"), Column("share after"))
    rows = tuple(
        (layer, rank, data["pre"]["spectrum"][i][j], data["post"]["spectrum"][i][j])
        for i, layer in enumerate(nerve.layers)
        for j, rank in enumerate(data["ranks"])
    )
    worst = int(nerve.post.pr.argmin())
    top = data["post"]["spectrum"][worst][0]
    return Chart(
        key="spectrum-of-layer",
        title="Spectrum of one layer",
        alt=f"Share of variance by rank. In layer {nerve.layers[worst]}, the narrowest after the nonlinearity, the first "
        f"direction alone has {top:.0%} of it.",
        table=Table(columns, rows),
        traces=traces,
        layout={
            "xaxis": {"title": "rank", "type": "log"},
            "yaxis": {"title": "share of variance", "type": "log", "exponentformat": "power"},
        },
        choices=choices,
    )


def stability_curve(stability: StabilityCurve) -> Chart:
    """Share of the prediction's energy that survives, by correlation."""
    rho, share = stability.rho.tolist(), stability.share.tolist()
    error = [1.96 * e if math.isfinite(e) else 0.0 for e in stability.share_stderr.tolist()]
    bars = {"type": "data", "array": error, "thickness": 1.2}
    parts = [f"{b:.0%} at {a:g}" for a, b in zip(rho, share, strict=True)]
    rows = tuple((a, b, b - e, b + e) for a, b, e in zip(rho, share, error, strict=True))
    columns = (Column("share of tokens kept"), Column("stability"), Column("low", "95 %"), Column("high", "95 %"))
    return Chart(
        key="stability",
        title="Noise stability of the next-token distribution",
        alt=f"Share of the prediction's energy that stays when only part of the tokens is kept: {', '.join(parts)}.",
        table=Table(columns, rows),
        traces=[_line(rho, share, "stability", 0, error_y=bars, showlegend=False)],
        layout={
            "xaxis": {"title": "share of tokens kept (the others are resampled)", "range": [-0.03, 1.03]},
            "yaxis": {"title": "stability (share)", "rangemode": "tozero"},
        },
    )


def four_bits_by_layer(four: FourBits) -> Chart:
    """Weight error of each scheme by block, and the KL of one."""
    layers = list(range(len(four.schemes[0].layer_error)))
    traces = [_line(layers, s.layer_error, s.scheme, k) for k, s in enumerate(four.schemes)]
    choices = {"weight error (‖Δ‖²/‖W‖²)": list(range(len(traces)))}
    columns = [Column("block"), *(Column(f"error {s.scheme}", "‖Δ‖²/‖W‖²") for s in four.schemes)]
    rows: list[tuple[Any, ...]] = [(i, *(s.layer_error[i] for s in four.schemes)) for i in layers]
    said = ""
    if four.layer_kl:
        mean = [i.mean for i in four.layer_kl]
        bars = _bars([i.low for i in four.layer_kl], mean, [i.high for i in four.layer_kl])
        choices[f"KL with only that block in {four.layer_scheme} (nats/token)"] = [len(traces)]
        traces.append(_line(layers, mean, f"KL, {four.layer_scheme}", 0, error_y=bars))
        columns.append(Column(f"KL {four.layer_scheme}", "nats/token"))
        rows = [(*row, kl) for row, kl in zip(rows, mean, strict=True)]
        worst = max(layers, key=lambda i: mean[i])
        said = f" Quantised alone, block {worst} moves predictions most: a KL of {mean[worst]:.4f} nats a token."
    errors = {s.scheme: s.relative_error for s in four.schemes}
    best = min(errors, key=lambda name: errors[name])
    return Chart(
        key="four-bits-by-layer",
        title="4 bits by block",
        alt=f"{best} has the smallest weight error over all blocks, {errors[best]:.4f} of the weights' energy.{said}",
        table=Table(tuple(columns), tuple(rows)),
        traces=traces,
        layout={"xaxis": {"title": "block"}, "yaxis": {"rangemode": "tozero"}},
        choices=choices,
    )
