"""One self-contained HTML page for an examination or a trial."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from assay import __version__
from assay.core.results import Column, Table, format_value, jsonable
from assay.examine import Examination
from assay.report import _figures as figures
from assay.report._figures import Chart

if TYPE_CHECKING:
    from assay.compressor import Compression
    from assay.trials import TrialRun


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("assay.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = format_value
    environment.globals["version"] = __version__
    return environment


def _script(value: Any) -> Markup:
    """JSON that may stand inside a script element."""
    text = json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())


def examination_page(examination: Examination) -> str:
    """The page of an examination.

    Args:
        examination: what `assay.examine.examine` gave.

    Returns:
        HTML that needs no network and no other file.
    """
    e = examination
    charts: dict[str, Chart] = {}

    def add(chart: Chart) -> None:
        charts[chart.key] = chart

    if e.loss is not None:
        add(figures.loss_by_position(e.loss))
    if e.heads is not None and e.heads.removals:
        add(figures.removal_cost(e.heads))
    if e.nerve is not None:
        add(figures.spectra(e.nerve))
        add(figures.spectrum_of_layer(e.nerve))
    if e.stability is not None:
        add(figures.stability_curve(e.stability))
    if e.four_bits is not None:
        add(figures.four_bits_by_layer(e.four_bits))
    return (
        _environment()
        .get_template("examination.html")
        .render(
            e=e,
            charts=charts,
            specs=_script({key: chart.spec() for key, chart in charts.items()}),
            plotly=_plotly() if charts else "",
            heads=_head_cells(e),
            facts=_facts(e),
            skipped={s.section: s.reason for s in e.skipped},
        )
    )


def compression_page(compression: Compression) -> str:
    """The page of a compressed model: before and after, what was tried, every layer."""
    c = compression
    measured = [x for x in c.layers if x.error == x.error]
    said = "No layer saw enough tokens for an error to be known."
    if measured:
        worst = max(measured, key=lambda x: x.error)
        said = (
            f"Squared error of each layer's output on the calibration inputs, as a share of the output's own square: at "
            f"most {worst.error:.2g}, in {worst.name}."
        )
    charts = {"layers": _chart("layers", "Output error by block", said, c.figure(), c.layer_table())}
    if c.tried:
        parts = (f"{t.name} {t.bits_per_weight:.2f} bits, {t.perplexity:.2f}" for t in c.tried)
        said = f"Perplexity on held-out text by the size of the packed layers: {'; '.join(parts)}."
        charts["tried"] = _chart("tried", "Perplexity by size", said, c.tried_figure(), c.tried_table())
    reasons = {why: [n for n, w in c.left.items() if w == why] for why in dict.fromkeys(c.left.values())}
    return (
        _environment()
        .get_template("compression.html")
        .render(
            c=c,
            charts=charts,
            specs=_script({key: chart.spec() for key, chart in charts.items()}),
            plotly=_plotly(),
            table_of_figures=replace(c.table(), title=""),
            reasons=reasons,
        )
    )


def _chart(key: str, title: str, alt: str, figure: Any, table: Table) -> Chart:
    drawn = figure.to_plotly_json()
    layout = {k: v for k, v in drawn["layout"].items() if k != "template"}
    return Chart(key=key, title=title, alt=alt, table=table, traces=drawn["data"], layout=layout)


def trial_page(run: TrialRun) -> str:
    """The page of a trial: question, verdict, arms, cost and picture."""
    verdict = run.verdict
    figure = verdict.figure().to_plotly_json()
    chart = Chart(
        key="trial",
        title="Every arm on every seed",
        alt=verdict.sentence(),
        table=_cells_table(run),
        traces=figure["data"],
        layout={k: v for k, v in figure["layout"].items() if k != "template"},
    )
    return (
        _environment()
        .get_template("trial.html")
        .render(
            v=verdict,
            charts={chart.key: chart},
            specs=_script({chart.key: chart.spec()}),
            plotly=_plotly(),
            verdict_table=verdict.table(),
            arms_table=verdict.arms_table(),
            cost_table=verdict.cost_table(),
        )
    )


def _cells_table(run: TrialRun) -> Table:
    names = [m.name for m in run.verdict.metrics]
    columns = (Column("arm"), Column("seed"), *(Column(n) for n in names), Column("time", "s"), Column("failure"))
    rows = tuple((c.arm, c.seed, *(c.metrics.get(n) for n in names), c.seconds, c.failure or "") for c in run.cells)
    return Table(columns, rows)


def _facts(e: Examination) -> list[tuple[str, str]]:
    m = e.model
    rows: list[tuple[str, str]] = [
        ("architecture", f"{m.architecture} ({m.model_type})"),
        ("parameters", f"{m.parameters:,}"),
        ("type", f"{m.stored_dtype} on disk, run in {m.dtype}"),
    ]
    if m.n_layers is not None:
        groups = f", {m.n_kv_heads} key-value heads" if m.n_kv_heads != m.n_heads else ""
        rows.append(("layers", f"{m.n_layers} of {m.n_heads} heads{groups}"))
        width = f", {m.ffn_size:,} feed-forward" if m.ffn_size else ""
        rows.append(("width", f"{m.hidden_size:,}{width}"))
    if m.context is not None:
        rows.append(("context", f"{m.context:,} tokens"))
    if m.vocab_size is not None:
        rows.append(("vocabulary", f"{m.vocab_size:,} tokens"))
        rows.append(("embedding and head", "share their weights" if m.tied else "separate weights"))
    return rows


def _head_cells(e: Examination) -> dict[str, Any] | None:
    """The layer × head map: one entry a cell, with what the page says about it."""
    if e.heads is None and e.rope is None:
        return None
    if e.heads is not None:
        n_layers, n_heads = e.heads.score.shape
        layers = list(range(n_layers))
    else:
        assert e.rope is not None
        layers, n_heads = list(e.rope.layers), len(e.rope.label[0])
    dead = set(e.health.dead_heads) if e.health is not None else set()
    cells: list[dict[str, Any]] = []
    for i, layer in enumerate(layers):
        row = []
        for head in range(n_heads):
            words = [f"layer {layer}, head {head}"]
            label, lean = "", 0.0
            if e.rope is not None and layer in e.rope.layers:
                k = e.rope.layers.index(layer)
                pos, sym = float(e.rope.pos[k, head]), float(e.rope.sym[k, head])
                label, lean = e.rope.label[k][head], pos - sym
                words.append(f"{label}: positional {pos:.2f}, content {sym:.2f}")
                words.append(f"entropy {float(e.rope.entropy[k, head]):.2f} nats")
            inactive = bool(e.heads is not None and e.heads.inactive[i, head])
            if e.heads is not None:
                words.append(f"activity {float(e.heads.score[i, head]):.2f} of the layer's mean")
            if (layer, head) in dead:
                words.append("weights are zero")
            if inactive:
                words.append("inactive")
            row.append(
                {
                    "said": "; ".join(words),
                    "label": label,
                    "lean": max(-1.0, min(1.0, lean if lean == lean else 0.0)),
                    "inactive": inactive or (layer, head) in dead,
                }
            )
        cells.append({"layer": layer, "row": row})
    labels = [c["label"] for r in cells for c in r["row"]]
    return {
        "cells": cells,
        "n_heads": n_heads,
        "counts": {k: labels.count(k) for k in ("positional", "symbolic", "mixed", "diffuse") if labels.count(k)},
        "inactive": sum(c["inactive"] for r in cells for c in r["row"]),
        "total": len(labels),
    }
