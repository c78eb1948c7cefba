"""What a trial showed: paired differences with intervals and plain words, then cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from assay.core.results import Column, Result, Table, format_value
from assay.core.stats import Interval, effect_size, mean_interval, paired_interval, ratio_interval
from assay.trials._trial import Metric, Trial

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Word = Literal["better", "worse", "no difference shown", "not measured", "not judged"]

_LEAST_MIB = 1.0  # below this, peak memory is the noise of the allocator


@dataclass(frozen=True)
class Cell:
    """One arm on one seed.

    Attributes:
        arm: its name.
        seed: the seed.
        metrics: one number a metric; None where it is not finite.
        seconds: wall time of the arm's `run`; None where it failed.
        peak_mib: most resident memory during `run` above what was resident before it, in MiB.
        peak_rss_mib: most resident memory of the process during `run`, in MiB.
        failure: why it failed, None where it did not.
    """

    arm: str
    seed: int
    metrics: dict[str, float | None]
    seconds: float | None = None
    peak_mib: float | None = None
    peak_rss_mib: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class ArmSummary:
    """One arm over all seeds.

    Attributes:
        name: its name.
        about: one line on what it is.
        values: per metric, one number a seed in the order of the verdict's seeds; None where there is none.
        intervals: per metric, the mean over seeds with its interval; None where no seed gave a number.
        seconds: mean wall time of `run`, None where no seed finished.
        peak_mib: largest peak memory of `run` above what was resident before it, in MiB.
        peak_rss_mib: largest resident memory of the process during `run`, in MiB.
        failures: the messages of the seeds that failed, each named once with how many it befell.
    """

    name: str
    about: str
    values: dict[str, tuple[float | None, ...]]
    intervals: dict[str, Interval | None]
    seconds: float | None
    peak_mib: float | None
    peak_rss_mib: float | None
    failures: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """The method against one baseline on one metric.

    Attributes:
        metric: the metric's name.
        baseline: the arm compared with.
        difference: mean over seeds of method minus baseline, with its interval, in the metric's unit; None where no
            seed gave both.
        effect: the difference in standard deviations of the paired differences (Cohen's d_z with Hedges' correction).
        word: what the difference says.
        why: a remark on the word, "" where it needs none.
    """

    metric: str
    baseline: str
    difference: Interval | None
    effect: float | None
    word: Word
    why: str = ""


@dataclass(frozen=True)
class Cost:
    """What the method costs against one baseline: ratios of means over the seeds that both finished.

    Attributes:
        baseline: the arm compared with.
        time_ratio: seconds of the method divided by those of the baseline; None where nothing was measured.
        memory_ratio: the same of peak memory above what was resident before; None also where either stays below 1 MiB.
    """

    baseline: str
    time_ratio: Interval | None
    memory_ratio: Interval | None


@dataclass(frozen=True)
class Verdict(Result):
    """What a trial showed.

    A word is given per metric and baseline: "better" or "worse" where the interval of the paired mean difference
    leaves out 0, "no difference shown" where it does not, "not measured" where an arm gave no number for every seed,
    "not judged" for a metric without a direction. Intervals are per comparison, not corrected for their number.

    Attributes:
        slug: the method.
        question: what the trial asks.
        source: the subject.
        budget: the name of the budget.
        seeds: the seeds that every arm ran with.
        level: the confidence level of all intervals.
        metrics: what was measured.
        arms: the method first, then its baselines.
        comparisons: metric by metric, baseline by baseline.
        costs: one a baseline.
    """

    slug: str
    question: str
    source: str
    budget: str
    seeds: tuple[int, ...]
    level: float
    metrics: tuple[Metric, ...]
    arms: tuple[ArmSummary, ...]
    comparisons: tuple[Comparison, ...]
    costs: tuple[Cost, ...]

    @property
    def method(self) -> str:
        """The name of the method's arm."""
        return self.arms[0].name

    @property
    def headline(self) -> Metric | None:
        """The first metric that has a direction."""
        return next((m for m in self.metrics if m.better), None)

    def table(self) -> Table:
        """Every comparison: the means, the paired difference with its interval, and the word."""
        by_name = {a.name: a for a in self.arms}
        units = {m.name: m for m in self.metrics}
        rows = []
        for c in self.comparisons:
            ours, theirs = (by_name[n].intervals[c.metric] for n in (self.method, c.baseline))
            d = c.difference
            rows.append(
                (
                    _metric_heading(units[c.metric]),
                    c.baseline,
                    ours.mean if ours else None,
                    theirs.mean if theirs else None,
                    d.mean if d else None,
                    d.low if d else None,
                    d.high if d else None,
                    f"{c.word}: {c.why}" if c.why else c.word,
                )
            )
        percent = f"{100 * self.level:g} %"
        columns = (
            Column("metric", about="what was measured; the arrow points to better"),
            Column("against", about="the baseline"),
            Column(self.method, about="mean over seeds"),
            Column("baseline", about="mean over seeds"),
            Column("difference", about="mean over seeds of method minus baseline"),
            Column("low", percent, "lower end of the interval of the difference"),
            Column("high", percent, "upper end of the interval of the difference"),
            Column("verdict", about="whether the interval leaves out 0; intervals are per comparison"),
        )
        return Table(columns, tuple(rows), f"{self.method} against its baselines, {_plural(len(self.seeds), 'seed')}")

    def cost_table(self) -> Table:
        """The method's time and memory as multiples of each baseline's."""
        rows = []
        for c in self.costs:
            t, m = c.time_ratio, c.memory_ratio
            rows.append(
                (
                    c.baseline,
                    *((t.mean, t.low, t.high) if t else (None,) * 3),
                    *((m.mean, m.low, m.high) if m else (None,) * 3),
                )
            )
        percent = f"{100 * self.level:g} %"
        columns = (
            Column("against", about="the baseline"),
            Column("time", "×", f"seconds of {self.method} divided by those of the baseline"),
            Column("time low", f"×, {percent}", "lower end of its interval"),
            Column("time high", f"×, {percent}", "upper end of its interval"),
            Column("memory", "×", "the same of peak memory; – below 1 MiB"),
            Column("memory low", f"×, {percent}", "lower end of its interval"),
            Column("memory high", f"×, {percent}", "upper end of its interval"),
        )
        return Table(columns, tuple(rows), f"Cost of {self.method} as a multiple")

    def arms_table(self) -> Table:
        """Every arm: its mean and interval per metric, its time and its memory."""
        rows = []
        for a in self.arms:
            cells = [None if (i := a.intervals[m.name]) is None else _with_interval(i) for m in self.metrics]
            rows.append((a.name, *cells, a.seconds, a.peak_mib, a.peak_rss_mib, "; ".join(a.failures)))
        columns = (
            Column("arm"),
            *(Column(m.name, m.unit, m.about) for m in self.metrics),
            Column("time", "s", "mean wall time of one seed"),
            Column("peak memory", "MiB", "most resident memory while it ran, above what its data took"),
            Column("resident", "MiB", "most resident memory of the whole process while it ran"),
            Column("failures", about="what went wrong, and on how many seeds"),
        )
        percent = f"{100 * self.level:g} %"
        return Table(columns, tuple(rows), f"Arms: mean over {_plural(len(self.seeds), 'seed')} [{percent} interval]")

    def sentence(self) -> str:
        """One plain sentence on the headline metric."""
        metric = self.headline
        place = f"On {self.source}, over {_plural(len(self.seeds), 'seed')}"
        if metric is None:
            return f"{place}, {self.method} was measured, and no metric of this trial has a direction to judge by."
        mine = [c for c in self.comparisons if c.metric == metric.name]
        unit = f" {metric.unit}" if metric.unit else ""
        parts = [
            f"{c.word} than {c.baseline} (difference {format_value(c.difference.mean)}{unit}, "
            f"{100 * self.level:g} % interval {format_value(c.difference.low)} to {format_value(c.difference.high)})"
            for word in ("better", "worse")
            for c in mine
            if c.word == word and c.difference is not None
        ]
        ties = [c.baseline for c in mine if c.word == "no difference shown"]
        if ties:
            why = f" ({mine[0].why})" if len(self.seeds) == 1 else ""
            parts.append(f"not shown to differ from {_listed(ties)}{why}")
        parts += [f"not measured against {c.baseline} ({c.why})" for c in mine if c.word == "not measured"]
        return f"{place}, {self.method} is {_listed(parts or ['measured without a baseline'])} on {metric.name}."

    def figure(self) -> Figure:
        """One panel a metric: every arm's seeds as points, its mean and interval as a bar."""
        from plotly.graph_objects import Scatter
        from plotly.subplots import make_subplots

        across = min(3, len(self.metrics))
        down = math.ceil(len(self.metrics) / across)
        figure: Figure = make_subplots(down, across, subplot_titles=[_metric_heading(m) for m in self.metrics])
        names = [a.name for a in self.arms]
        for k, metric in enumerate(self.metrics):
            row, col = k // across + 1, k % across + 1
            points = [
                (a.name, value, seed)
                for a in self.arms
                for value, seed in zip(a.values[metric.name], self.seeds, strict=True)
                if value is not None
            ]
            figure.add_trace(
                Scatter(
                    x=[p[0] for p in points],
                    y=[p[1] for p in points],
                    text=[f"seed {p[2]}" for p in points],
                    mode="markers",
                    marker={"size": 6, "opacity": 0.5, "color": "#7a8699"},
                    name="one seed",
                    showlegend=k == 0,
                ),
                row,
                col,
            )
            means = [(a.name, i) for a in self.arms if (i := a.intervals[metric.name]) is not None]
            figure.add_trace(
                Scatter(
                    x=[name for name, _ in means],
                    y=[i.mean for _, i in means],
                    # With one seed there is no interval, and the bar has no length.
                    error_y={
                        "type": "data",
                        "symmetric": False,
                        "array": [i.high - i.mean if math.isfinite(i.high) else 0.0 for _, i in means],
                        "arrayminus": [i.mean - i.low if math.isfinite(i.low) else 0.0 for _, i in means],
                    },
                    mode="markers",
                    marker={"size": 10, "symbol": "diamond", "color": "#1f5fbf"},
                    name=f"mean, {100 * self.level:g} % interval",
                    showlegend=k == 0,
                ),
                row,
                col,
            )
            figure.update_xaxes(categoryorder="array", categoryarray=names, row=row, col=col)
            if metric.unit:
                figure.update_yaxes(title_text=metric.unit, row=row, col=col)
        figure.update_layout(
            height=320 * down + 80,
            template="plotly_white",
            legend={"orientation": "h", "y": -0.15 / down},
            margin={"t": 60},
        )
        return figure


def judge(
    trial: Trial, cells: Sequence[Cell], *, source: str, budget: str, seeds: Sequence[int], level: float = 0.95
) -> Verdict:
    """The verdict on the cells of a trial.

    Args:
        trial: what was tried.
        cells: one an arm and seed.
        source: the subject, for the sentence.
        budget: the name of the budget.
        seeds: the seeds, which pair the arms.
        level: the confidence level of all intervals.
    """
    found = {(c.arm, c.seed): c for c in cells}
    arms = tuple(_summary(a.name, a.about, [found[a.name, s] for s in seeds], trial.metrics, level) for a in trial.arms)
    method, *baselines = arms
    comparisons = tuple(_compare(m, method, b, level) for m in trial.metrics for b in baselines)
    ours = [found[method.name, s] for s in seeds]
    costs = tuple(_cost(ours, [found[b.name, s] for s in seeds], level) for b in baselines)
    return Verdict(
        trial.slug, trial.question, source, budget, tuple(seeds), level, trial.metrics, arms, comparisons, costs
    )


def _summary(name: str, about: str, cells: Sequence[Cell], metrics: Sequence[Metric], level: float) -> ArmSummary:
    values = {m.name: tuple(c.metrics.get(m.name) for c in cells) for m in metrics}
    intervals: dict[str, Interval | None] = {}
    for metric, numbers in values.items():
        known = [v for v in numbers if v is not None]
        intervals[metric] = mean_interval(known, level=level) if known else None
    messages = [c.failure for c in cells if c.failure is not None]
    failures = tuple(f"{m} ({_plural(messages.count(m), 'seed')} of {len(cells)})" for m in dict.fromkeys(messages))
    seconds = [c.seconds for c in cells if c.seconds is not None]
    peaks = [c.peak_mib for c in cells if c.peak_mib is not None]
    resident = [c.peak_rss_mib for c in cells if c.peak_rss_mib is not None]
    return ArmSummary(
        name,
        about,
        values,
        intervals,
        float(np.mean(seconds)) if seconds else None,
        max(peaks, default=None),
        max(resident, default=None),
        failures,
    )


def _compare(metric: Metric, method: ArmSummary, baseline: ArmSummary, level: float) -> Comparison:
    ours, theirs = method.values[metric.name], baseline.values[metric.name]
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    difference, effect = None, None
    if pairs:
        differences = [_difference(a, b) for a, b in pairs]
        difference = paired_interval(differences, level=level)
        effect = effect_size(differences)
    if metric.better is None:
        return Comparison(metric.name, baseline.name, difference, effect, "not judged")
    if difference is None or len(pairs) < len(ours):
        # A mean over the seeds that went well would flatter an arm that fails on hard ones.
        return Comparison(
            metric.name, baseline.name, difference, effect, "not measured", _missing(metric.name, method, baseline)
        )
    if not difference.excludes(0.0):
        why = "one seed gives no interval" if difference.n < 2 else ""
        return Comparison(metric.name, baseline.name, difference, effect, "no difference shown", why)
    up = difference.mean > 0
    word: Word = "better" if up == (metric.better == "higher") else "worse"
    why = "the same difference on every seed" if difference.low == difference.high else ""
    return Comparison(metric.name, baseline.name, difference, effect, word, why)


def _difference(a: float, b: float) -> float:
    """a - b, and 0 where they differ by no more than the last digits of a float64."""
    return 0.0 if math.isclose(a, b, rel_tol=1e-15, abs_tol=0.0) else a - b


def _missing(metric: str, *arms: ArmSummary) -> str:
    parts = []
    for arm in arms:
        lacking = sum(v is None for v in arm.values[metric])
        if lacking and arm.failures:
            parts.append(f"{arm.name} failed: {arm.failures[0]}")
        elif lacking:
            parts.append(
                f"{arm.name} gave no finite {metric} on {_plural(lacking, 'seed')} of {len(arm.values[metric])}"
            )
    return "; ".join(parts)


def _cost(ours: Sequence[Cell], theirs: Sequence[Cell], level: float) -> Cost:
    times = [(a.seconds, b.seconds) for a, b in zip(ours, theirs, strict=True) if a.seconds and b.seconds]
    peaks = [
        (a.peak_mib, b.peak_mib)
        for a, b in zip(ours, theirs, strict=True)
        if a.peak_mib is not None and b.peak_mib is not None
    ]
    time = ratio_interval([a for a, _ in times], [b for _, b in times], level=level) if times else None
    measurable = bool(peaks) and min(min(p) for p in peaks) >= _LEAST_MIB
    memory = ratio_interval([a for a, _ in peaks], [b for _, b in peaks], level=level) if measurable else None
    return Cost(theirs[0].arm, time, memory)


def _metric_heading(metric: Metric) -> str:
    arrow = {"higher": " ↑", "lower": " ↓", None: ""}[metric.better]
    return f"{metric.name}{arrow}" + (f" ({metric.unit})" if metric.unit else "")


def _with_interval(i: Interval) -> str:
    if not math.isfinite(i.low):
        return format_value(i.mean)
    return f"{format_value(i.mean)} [{format_value(i.low)}, {format_value(i.high)}]"


def _listed(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def _plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
