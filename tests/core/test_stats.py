import math

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from assay.core.errors import InputError
from assay.core.stats import effect_size, mean_interval, paired_interval, pearson, ratio_interval


def test_t_interval_is_scipys():
    d = np.array([0.3, -0.1, 0.4, 0.9, 0.2])
    low, high = scipy_stats.t.interval(0.9, 4, loc=d.mean(), scale=scipy_stats.sem(d))
    i = paired_interval(d, level=0.9)
    assert (i.method, i.n, i.level) == ("t", 5, 0.9)
    assert (i.low, i.high) == pytest.approx((low, high))


def test_pairs_equal_differences():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 12))
    assert paired_interval(a, b) == paired_interval(a - b)


def test_swapping_the_sides_mirrors_the_interval():
    rng = np.random.default_rng(0)
    a, b = rng.exponential(size=(2, 15))
    one, other = paired_interval(a, b, method="t"), paired_interval(b, a, method="t")
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_interval_follows_shift_and_scale():
    x = np.random.default_rng(1).exponential(size=20)
    one, other = mean_interval(x), mean_interval(3 * x + 5)
    assert (other.mean, other.low, other.high) == pytest.approx([3 * v + 5 for v in (one.mean, one.low, one.high)])


def test_auto_takes_the_wider_end():
    x = np.random.default_rng(2).exponential(size=15)
    auto, t, boot = (mean_interval(x, method=m) for m in ("auto", "t", "bootstrap"))
    assert auto.method == "bootstrap and t"
    assert auto.low == min(t.low, boot.low)
    assert auto.high == max(t.high, boot.high)


@pytest.mark.parametrize(("n", "used"), [(2, "t"), (7, "t"), (8, "bootstrap and t"), (2001, "t")])
def test_auto_chooses_by_size(n, used):
    assert mean_interval(np.random.default_rng(0).normal(size=n)).method == used


def test_one_value_has_no_interval():
    i = paired_interval([1.5])
    assert i.mean == 1.5
    assert math.isnan(i.low)
    assert math.isnan(i.high)
    assert i.method == "none"
    assert not i.excludes(0.0)


def test_equal_differences_have_an_interval_of_no_width():
    i = paired_interval([0.3 + 0.1] * 9, [0.1] * 9)
    assert i.low == i.mean == i.high == (0.3 + 0.1) - 0.1


def test_ties_fall_back_on_t():
    i = paired_interval([1.0, *[0.0] * 9], method="bootstrap")
    assert i.method == "t"
    assert math.isfinite(i.low)


def test_same_seed_same_interval_and_other_seed_close():
    x = np.random.default_rng(3).exponential(size=25)
    assert mean_interval(x, seed=1) == mean_interval(x, seed=1)
    assert mean_interval(x, seed=1).high == pytest.approx(mean_interval(x, seed=2).high, rel=0.05)


def test_resamples_in_chunks_are_the_same_resamples(monkeypatch):
    x = np.random.default_rng(4).exponential(size=50)
    whole = mean_interval(x)
    monkeypatch.setattr("assay.core.stats._CHUNK", 1000)
    assert mean_interval(x) == whole


DRAWS = {
    "normal": (lambda rng, n: rng.normal(size=n), 0.0),
    "exponential": (lambda rng, n: rng.exponential(size=n), 1.0),
    "lognormal": (lambda rng, n: rng.lognormal(0, 0.5, n), math.exp(0.125)),
    "skewed differences": (lambda rng, n: rng.gamma(1, 1, n) - rng.gamma(2, 0.3, n), 0.4),
    "heavy tails": (lambda rng, n: rng.standard_t(3, n), 0.0),
}


@pytest.mark.parametrize("n", [10, 20, 40])
@pytest.mark.parametrize("law", DRAWS)
def test_coverage_of_the_paired_bootstrap_is_within_two_points(law, n):
    draw, true = DRAWS[law]
    rng = np.random.default_rng(20_000 + n)
    trials = 2000
    inside = 0
    for seed in range(trials):
        i = paired_interval(draw(rng, n), n_resamples=399, seed=seed)
        assert "bootstrap" in i.method
        inside += i.low <= true <= i.high
    # The simulation itself is off by 1.5 points at 3 standard errors; it is not added to the two points.
    assert abs(inside / trials - 0.95) <= 0.02


@pytest.mark.parametrize(("law", "n"), [("normal", 5), ("normal", 7)])
def test_coverage_of_t_below_eight(law, n):
    draw, true = DRAWS[law]
    rng = np.random.default_rng(n)
    intervals = [paired_interval(draw(rng, n)) for _ in range(4000)]
    assert abs(np.mean([i.low <= true <= i.high for i in intervals]) - 0.95) <= 0.02


def test_coverage_with_groups_as_the_unit():
    rng = np.random.default_rng(5)
    inside, naive = 0, 0
    groups = np.repeat(np.arange(20), 10)
    for seed in range(800):
        x = np.repeat(rng.normal(size=20), 10) + 0.3 * rng.normal(size=200)
        i = mean_interval(x, groups=groups, n_resamples=399, seed=seed)
        inside += i.low <= 0 <= i.high
        j = mean_interval(x, method="t")
        naive += j.low <= 0 <= j.high
    assert abs(inside / 800 - 0.95) <= 0.02
    assert naive / 800 < 0.7


def test_groups_keep_the_plain_mean():
    x = np.arange(7.0)
    i = mean_interval(x, groups=["a", "a", "b", "b", "b", "c", "c"], method="t")
    assert i.mean == x.mean()
    assert i.n == 3


def test_groups_of_one_are_the_values():
    x = np.random.default_rng(0).normal(size=12)
    one, other = mean_interval(x), mean_interval(x, groups=np.arange(12))
    assert (one.mean, one.low, one.high) == pytest.approx((other.mean, other.low, other.high))


def test_ratio_and_its_inverse():
    rng = np.random.default_rng(1)
    a, b = rng.lognormal(size=(2, 6))
    one, other = ratio_interval(a, b), ratio_interval(b, a)
    assert one.mean == pytest.approx(a.mean() / b.mean())
    assert (one.low, one.high) == pytest.approx((1 / other.high, 1 / other.low))


def test_coverage_of_the_ratio():
    rng = np.random.default_rng(6)
    inside = 0
    for seed in range(1500):
        size = rng.lognormal(0, 0.5, 20)
        i = ratio_interval(3 * size * rng.lognormal(0, 0.2, 20), size, n_resamples=399, seed=seed)
        inside += i.low <= 3 * math.exp(0.02) <= i.high
    assert abs(inside / 1500 - 0.95) <= 0.02


def test_effect_size_known_value():
    # d = 2 / 1, J(2) = Γ(1) / (Γ(1/2) · sqrt(1)) = 1 / sqrt(π)
    assert effect_size([1.0, 2.0, 3.0]) == pytest.approx(2 / math.sqrt(math.pi))


def test_effect_size_is_nearly_unbiased():
    rng = np.random.default_rng(7)
    d = rng.normal(0.8, 1.0, size=(20_000, 6))
    assert np.mean([effect_size(row) for row in d]) == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    ("differences", "expected"), [([0.0] * 4, 0.0), ([0.1] * 4, math.inf), ([-0.1] * 4, -math.inf)]
)
def test_effect_size_without_spread(differences, expected):
    assert effect_size(differences) == expected


def test_effect_size_of_two_pairs_is_unknown():
    assert math.isnan(effect_size([1.0, 2.0]))


def test_pearson_is_scipys():
    rng = np.random.default_rng(8)
    x = rng.normal(size=30)
    y = x + rng.normal(size=30)
    theirs = scipy_stats.pearsonr(x, y)
    ci = theirs.confidence_interval(0.95)
    i = pearson(x, y)
    assert (i.mean, i.low, i.high) == pytest.approx((theirs.statistic, ci.low, ci.high))


def test_pearson_limits():
    assert math.isnan(pearson([1, 1, 1, 1], [1, 2, 3, 4]).mean)
    assert math.isnan(pearson([1, 2, 3], [1, 3, 2]).low)
    assert pearson([1, 2, 3, 4, 5], [-2, -4, -6, -8, -10]).mean == pytest.approx(-1.0)
    assert pearson(np.array([1e-200, 2e-200, 4e-200, 5e-200]), [1, 2, 4, 5]).mean == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_takes_tensors(dtype):
    x = torch.arange(10, dtype=dtype, requires_grad=True)
    assert mean_interval(x).mean == 4.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_interval([]), "a is empty"),
        (lambda: paired_interval([1.0, 2.0], [1.0]), "a has 2 values and b has 1"),
        (lambda: paired_interval([1.0, math.nan]), "a has 1 values that are not finite (first at 1)"),
        (lambda: mean_interval([1.0, 2.0], groups=[1]), "groups has 1 labels for 2 values"),
        (lambda: mean_interval([1.0, 2.0], level=95), "level is 95"),
        (lambda: mean_interval([1.0, 2.0], method="bca"), "method is 'bca'"),
        (lambda: mean_interval(range(9), n_resamples=10), "n_resamples is 10"),
        (lambda: ratio_interval([1.0, 2.0], [0.0, 1.0]), "positive"),
        (lambda: ratio_interval([1.0], [1.0, 2.0]), "a has 1 values and b has 2"),
        (lambda: effect_size([1.0], [1.0, 2.0]), "a has 1 values and b has 2"),
        (lambda: pearson([1.0], [1.0]), "at least two pairs"),
        (lambda: pearson([1.0, 2.0], [1.0]), "x has 2 values and y has 1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
