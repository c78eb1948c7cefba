import json
import math

import pytest

from assay.trials import Arm, Cell, Metric, Trial, judge
from assay.trials._verdict import Verdict


def never(*_, **__):
    raise AssertionError("a verdict runs nothing")


METRICS = (Metric("size", None, "kB"), Metric("score", "higher", "points"), Metric("loss", "lower"))


def verdict(**arms):
    """A verdict on scores per seed; each arm is a list of scores, loss is minus the score, size is 1."""
    trial = Trial(
        "fake", "Is it?", "table", "builtin:x", never, tuple(Arm(a, never, f"about {a}") for a in arms), METRICS
    )
    cells = []
    for name, scores in arms.items():
        for seed, score in enumerate(scores):
            if isinstance(score, str):
                cells.append(Cell(name, seed, {}, failure=score))
            else:
                measured = {"size": 1.0, "score": score, "loss": None if score is None else -score}
                cells.append(Cell(name, seed, measured, 2.0 if name == "ours" else 1.0, 8.0, 108.0))
    n = len(next(iter(arms.values())))
    return judge(trial, cells, source="builtin:x", budget="quick", seeds=range(n))


def word(v: Verdict, metric: str, baseline: str = "base"):
    return next(c.word for c in v.comparisons if (c.metric, c.baseline) == (metric, baseline))


def why(v: Verdict, metric: str, baseline: str = "base"):
    return next(c.why for c in v.comparisons if (c.metric, c.baseline) == (metric, baseline))


HIGH, LOW = [1.1, 2.2, 3.1, 4.2], [1.0, 2.0, 3.0, 4.0]


def test_words_follow_the_metrics_direction():
    up, down = verdict(ours=HIGH, base=LOW), verdict(ours=LOW, base=HIGH)
    assert [word(up, m) for m in ("size", "score", "loss")] == ["not judged", "better", "better"]
    assert [word(down, m) for m in ("size", "score", "loss")] == ["not judged", "worse", "worse"]


def test_differences_are_taken_seed_by_seed():
    v = verdict(ours=HIGH, base=LOW)
    c = next(c for c in v.comparisons if c.metric == "score")
    assert c.difference.mean == pytest.approx(0.15)
    assert c.difference.n == 4
    # Unpaired, the spread between seeds would drown the difference; dealt out anew, the pairs do.
    assert word(verdict(ours=HIGH, base=[3.0, 1.0, 4.0, 2.0]), "score") == "no difference shown"


def test_interval_over_zero_shows_no_difference():
    assert word(verdict(ours=[1.0, 2.0, 3.0], base=[1.1, 1.9, 3.05]), "score") == "no difference shown"


def test_exact_ties_show_no_difference():
    v = verdict(ours=LOW, base=LOW)
    assert word(v, "score") == "no difference shown"
    assert next(c for c in v.comparisons if c.metric == "score").effect == 0.0


def test_rounding_shows_no_difference():
    assert word(verdict(ours=[0.1 + 0.2] * 3, base=[0.3] * 3), "score") == "no difference shown"


def test_the_same_difference_everywhere_is_judged_and_said():
    v = verdict(ours=[2.0, 2.0], base=[1.0, 1.0])
    assert word(v, "score") == "better"
    assert why(v, "score") == "the same difference on every seed"


def test_one_seed_judges_nothing():
    v = verdict(ours=[2.0], base=[1.0])
    assert word(v, "score") == "no difference shown"
    assert why(v, "score") == "one seed gives no interval"
    assert v.sentence().endswith("not shown to differ from base (one seed gives no interval) on score.")


@pytest.mark.parametrize("side", ["ours", "base"])
def test_a_failed_seed_on_either_side_is_not_measured(side):
    scores = {"ours": HIGH, "base": LOW} | {side: [1.0, "it broke", 3.0, "it broke"]}
    v = verdict(**scores)
    assert word(v, "score") == "not measured"
    assert why(v, "score") == f"{side} failed: it broke (2 seeds of 4)"
    assert next(c for c in v.comparisons if c.metric == "score").difference.n == 2


def test_a_number_that_is_not_finite_is_not_measured():
    v = verdict(ours=HIGH, base=[1.0, None, 3.0, 4.0])
    assert word(v, "score") == "not measured"
    assert why(v, "score") == "base gave no finite score on 1 seed of 4"


def test_one_failing_baseline_leaves_the_others_judged():
    v = verdict(ours=HIGH, base=LOW, broken=["no"] * 4)
    assert word(v, "score") == "better"
    assert word(v, "score", "broken") == "not measured"
    broken = v.arms[2]
    assert (broken.seconds, broken.peak_mib, broken.intervals["score"]) == (None, None, None)
    assert broken.failures == ("no (4 seeds of 4)",)
    assert v.costs[1].time_ratio is None
    assert "broken" in str(v.arms_table())


def test_cost_is_a_ratio_of_means():
    v = verdict(ours=HIGH, base=LOW)
    assert v.costs[0].time_ratio.mean == 2.0
    assert v.costs[0].memory_ratio.mean == 1.0


def test_memory_below_a_mebibyte_gives_no_ratio():
    v = verdict(ours=HIGH, base=LOW)
    trial = Trial("fake", "", "", "", never, (Arm("ours", never), Arm("base", never)), ())
    cells = [Cell("ours", 0, {}, 1.0, 500.0, 600.0), Cell("base", 0, {}, 1.0, 0.2, 100.0)]
    small = judge(trial, cells, source="x", budget="quick", seeds=[0])
    assert small.costs[0].memory_ratio is None
    assert small.costs[0].time_ratio.mean == 1.0
    assert v.headline is METRICS[1]
    assert small.headline is None
    assert "no metric of this trial has a direction" in small.sentence()


def test_sentence_names_every_baseline_once_and_the_headline():
    v = verdict(ours=HIGH, base=LOW, strong=[2.0, 3.1, 4.0, 5.1], twin=HIGH, other=HIGH, broken=["no"] * 4)
    assert v.sentence() == (
        "On builtin:x, over 4 seeds, ours is better than base (difference 0.15 points, 95 % interval 0.05813 to "
        "0.2419), worse than strong (difference -0.9 points, 95 % interval -0.9 to -0.9), not shown to differ "
        "from twin and other and not measured against broken (broken failed: no (4 seeds of 4)) on score."
    )


def test_tables_have_units_directions_and_every_comparison():
    v = verdict(ours=HIGH, base=LOW, other=LOW)
    assert len(v.table()) == 6
    text = str(v.table())
    assert "score ↑ (points)" in text
    assert "loss ↓" in text
    assert "low (95 %)" in text
    arms = str(v.arms_table())
    assert "time (s)" in arms
    assert "peak memory (MiB)" in arms
    assert "time (×)" in str(v.cost_table())


def test_to_dict_is_strict_json():
    v = verdict(ours=[2.0], base=["no"])
    text = json.dumps(v.to_dict(), allow_nan=False)
    assert json.loads(text)["arms"][0]["intervals"]["score"]["low"] is None


def test_figure_shows_every_seed_and_the_interval():
    v = verdict(ours=HIGH, base=LOW)
    figure = v.figure()
    assert len(figure.data) == 2 * len(METRICS)
    points, means = figure.data[2:4]
    assert len(points.y) == 8
    assert list(means.x) == ["ours", "base"]
    i = v.arms[0].intervals["score"]
    assert means.error_y.array[0] == pytest.approx(i.high - i.mean)
    assert [a.text for a in figure.layout.annotations] == ["size (kB)", "score ↑ (points)", "loss ↓"]


def test_figure_of_one_seed_and_a_failed_arm():
    figure = verdict(ours=[2.0], base=["no"]).figure()
    assert list(figure.data[2].y) == [2.0]
    assert all(math.isfinite(e) for e in figure.data[3].error_y.array)
