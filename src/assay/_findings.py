"""From measurements to three to six findings in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.special import stdtrit

from assay.core.stats import Interval, mean_interval

if TYPE_CHECKING:
    from assay.core.health import WeightHealth
    from assay.core.loss import LossResult
    from assay.examine import FourBits, HeadMap, ModelFacts
    from assay.lens import NerveResult, RopeHeadsResult, StabilityCurve

MAX_FINDINGS = 6


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing, in plain words.

    Attributes:
        key: a stable name.
        level: "warning" (act), "note" (know), "good" (rest easy).
        sentence: what was found.
        number, unit: the figure in it.
        low, high: its 95 % interval, None where it was counted and not estimated.
        uncertainty: what the interval rests on, or that there is none.
        command: what to run next.
        section: where in the report the evidence stands.
    """

    key: str
    level: Literal["warning", "note", "good"]
    sentence: str
    number: float
    unit: str
    low: float | None
    high: float | None
    uncertainty: str
    command: str
    section: str


def find(
    name: str,
    model: ModelFacts,
    health: WeightHealth | None,
    loss: LossResult | None,
    heads: HeadMap | None,
    rope: RopeHeadsResult | None,
    nerve: NerveResult | None,
    stability: StabilityCurve | None,
    four_bits: FourBits | None,
) -> tuple[Finding, ...]:
    """The findings, warnings first; at most `MAX_FINDINGS`."""
    found: list[Finding] = []
    if health is not None:
        found += _of_health(name, health)
    if four_bits is not None:
        found += _of_four_bits(name, four_bits)
    if heads is not None:
        found += _of_heads(name, heads)
    if rope is not None:
        found += _of_rope(name, rope)
    if nerve is not None:
        found += _of_nerve(name, nerve)
    if stability is not None:
        found += _of_stability(name, stability)
    if loss is not None:
        found += _of_loss(name, loss)
    if health is not None:
        found += _of_duplicates(name, health)
    found.sort(key=lambda f: f.level != "warning")
    return tuple(found[:MAX_FINDINGS])


def _finding(
    key: str,
    level: Literal["warning", "note", "good"],
    sentence: str,
    number: float,
    unit: str,
    command: str,
    section: str,
    interval: Interval | None = None,
    uncertainty: str = "counted, not estimated",
) -> Finding:
    low, high = (interval.low, interval.high) if interval and math.isfinite(interval.low) else (None, None)
    if interval and low is None:
        uncertainty = f"{uncertainty}; one unit only, so no interval"
    return Finding(key, level, sentence, number, unit, low, high, uncertainty, command, section)


def _of_health(name: str, health: WeightHealth) -> Iterator[Finding]:
    command = f"assay examine {name} --only health"
    if health.not_finite:
        worst = health.suspicious()[0].name
        yield _finding(
            "not-finite", "warning",
            f"{health.not_finite:,} weights are NaN or infinite (first in {worst}), so the model cannot be used as it is.",
            health.not_finite, "weights", command, "health",
        )  # fmt: skip
    dead = len(health.dead_units) + len(health.dead_heads)
    if dead:
        places = [f"unit {u} of layer {layer}" for layer, u in health.dead_units[:2]]
        places += [f"head {h} of layer {layer}" for layer, h in health.dead_heads[:2]]
        yield _finding(
            "dead-parts", "warning",
            f"{_count(len(health.dead_units), 'feed-forward unit')} and {_count(len(health.dead_heads), 'attention head')} "
            f"with weights of zero can pass nothing on ({', '.join(places)}{', …' if dead > len(places) else ''}).",
            dead, "parts", command, "health",
        )  # fmt: skip


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _of_duplicates(name: str, health: WeightHealth) -> Iterator[Finding]:
    twice = sum(t.duplicate_rows for t in health.tensors)
    if twice:
        where = max(health.tensors, key=lambda t: t.duplicate_rows).name
        yield _finding(
            "duplicate-rows", "note",
            f"{twice:,} weight rows equal an earlier one (most in {where}): in an embedding, tokens that were never trained "
            "apart.",
            twice, "rows", f"assay examine {name} --only health", "health",
        )  # fmt: skip


def _of_four_bits(name: str, four: FourBits) -> Iterator[Finding]:
    measured = [s for s in four.schemes if s.drift is not None]
    if not measured:
        return
    best = min(measured, key=lambda s: s.drift.kl.mean if s.drift else math.inf)
    assert best.drift is not None
    change = best.drift.loss_change
    others = ", ".join(f"{s.scheme} {s.drift.kl.mean:.3f}" for s in measured if s is not best and s.drift is not None)
    yield _finding(
        "four-bits", "note" if best.drift.kl.mean > 0.05 else "good",
        f"Of the 4-bit schemes tried, {best.scheme} moves predictions least: a KL of {best.drift.kl.mean:.3f} nats a token "
        f"at {best.bits_per_weight:.2f} bits a weight (others: {others or 'none'}). The loss changes by "
        f"{change.mean:+.3f} nats a token.",
        change.mean, "nats/token", f"assay try bof4 --on {name}", "four-bits", change,
        f"95 % interval of the loss change over {change.n} windows of text",
    )  # fmt: skip


def _of_heads(name: str, heads: HeadMap) -> Iterator[Finding]:
    command = f"assay try inactive-heads --on {name}"
    total = heads.score.numel()
    if heads.tolerated is not None:
        r = heads.tolerated
        count = round(r.zeroed * total)
        yield _finding(
            "inactive-heads", "note",
            f"About {count} of {total} attention heads ({r.zeroed:.0%}) can be zeroed, chosen anew for each text, for a loss "
            f"change of {r.change.mean:+.4f} nats a token.",
            r.change.mean, "nats/token", command, "heads", r.change,
            f"95 % interval over {r.change.n} windows of text",
        )  # fmt: skip
    elif heads.removals:
        r = heads.removals[0]
        sure = r.change.low > 0
        said = "No attention heads are dead weight" if sure else "No attention heads were shown to be dead weight"
        yield _finding(
            "no-inactive-heads", "good" if sure else "note",
            f"{said}: zeroing the {r.zeroed:.0%} that do least changes the loss by {r.change.mean:+.3f} nats a token.",
            r.change.mean, "nats/token", command, "heads", r.change,
            f"95 % interval over {r.change.n} windows of text",
        )  # fmt: skip


def _of_rope(name: str, rope: RopeHeadsResult) -> Iterator[Finding]:
    labels = [label for row in rope.label for label in row]
    n = {kind: labels.count(kind) for kind in ("positional", "symbolic", "mixed", "diffuse")}
    gap = (rope.pos - rope.sym).flatten().numpy()
    gap = gap[np.isfinite(gap)]
    if not len(gap):
        return
    interval = mean_interval(gap)
    yield _finding(
        "rope-heads", "note",
        f"{n['positional']} of {len(labels)} attention heads go by position and {n['symbolic']} by content; "
        f"{n['mixed']} mix the two and {n['diffuse']} attend to nothing in particular. The positional score is higher "
        f"by {interval.mean:+.2f} on average.",
        interval.mean, "", f"assay try rope-heads --on {name}", "heads", interval,
        f"95 % interval of the mean difference over {interval.n} heads, {rope.n_prompts} texts each",
    )  # fmt: skip


def _of_nerve(name: str, nerve: NerveResult) -> Iterator[Finding]:
    gain = nerve.pr_gain.double().numpy()
    interval = mean_interval(np.log(gain))
    low, high, middle = (
        math.exp(v) if math.isfinite(v) else math.nan for v in (interval.low, interval.high, interval.mean)
    )
    worst = int(nerve.post.pr.argmin())
    share = float(nerve.post.eigs[worst, 0] / nerve.post.eigs[worst].sum())
    massive = f", one direction alone holding {share:.0%} of the variance" if share > 0.5 else ""
    limited = " There were fewer tokens than hidden units, so both counts are too low." if nerve.rank_limited else ""
    falls = int((nerve.pr_gain < 1).sum())
    verb = "spreads" if middle > 1 else "concentrates"
    yield _finding(
        "spectra", "note",
        f"The nonlinearity {verb} activations over {middle:.1f} times as many directions (geometric mean over layers; it "
        f"narrows them in {falls} of {len(gain)}). Layer {nerve.layers[worst]} uses the fewest after it: "
        f"{float(nerve.post.pr[worst]):.1f} of {nerve.width:,}{massive}.{limited}",
        middle, "× directions", f"assay try nerve --on {name}", "spectra",
        Interval(middle, low, high, interval.level, interval.n, interval.method),
        f"95 % interval over {interval.n} layers",
    )  # fmt: skip


def _of_stability(name: str, stability: StabilityCurve) -> Iterator[Finding]:
    rhos = [float(r) for r in stability.rho]
    usable = [i for i, r in enumerate(rhos) if 0 < r < 1]
    if not usable:
        return
    i = usable[-1]
    share, error = float(stability.share[i]), float(stability.share_stderr[i])
    reach = float(stdtrit(stability.n_windows - 1, 0.975)) * error if stability.n_windows > 1 else math.nan
    yield _finding(
        "noise-stability", "note",
        f"When one token in {1 / (1 - rhos[i]):.0f} is replaced at random, {share:.0%} of the prediction's energy stays "
        "where it was.",
        share, "share", f"assay try noise-stability --on {name}", "stability",
        Interval(share, share - reach, share + reach, 0.95, stability.n_windows, "t"),
        f"95 % interval over {stability.n_windows} windows of text",
    )  # fmt: skip


def _of_loss(name: str, loss: LossResult) -> Iterator[Finding]:
    interval = loss.loss
    low, high = (math.exp(v) if math.isfinite(v) else math.nan for v in (interval.low, interval.high))
    (*first, early), (*last, late) = loss.buckets()[0], loss.buckets()[-1]
    places = ["–".join(map(str, dict.fromkeys(pair))) for pair in (first, last)]
    yield _finding(
        "perplexity", "note",
        f"Perplexity on the text is {loss.perplexity:.2f} (loss {interval.mean:.3f} nats a token); from position "
        f"{places[0]} to {places[1]} of a window the loss goes from {early:.2f} to {late:.2f}.",
        loss.perplexity, "perplexity", f"assay examine {name} --only loss --text YOUR_TEXT", "loss",
        Interval(loss.perplexity, low, high, interval.level, interval.n, interval.method),
        f"95 % interval over {interval.n} windows of text",
    )  # fmt: skip
