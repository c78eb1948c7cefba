"""Intervals for means, paired differences, ratios and correlations, at the sample sizes that trials have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Integer
from numpy.typing import ArrayLike
from scipy.special import gammaln, ndtri, stdtrit

from assay.core.errors import InputError

IntervalMethod = Literal["auto", "bootstrap", "t"]

# Below this the bootstrap has too few distinct resamples for a 2.5 % tail.
MIN_BOOTSTRAP = 8
# Above this the studentised bootstrap and Student's t nearly agree, and the bootstrap only costs time.
MAX_BOOTSTRAP = 2000
_CHUNK = 2**21  # resampled values held at once


@dataclass(frozen=True)
class Interval:
    """A point estimate with its confidence interval.

    Attributes:
        mean: the estimate: a mean, or the ratio or correlation of the functions that say so.
        low: the lower end, in the unit of `mean`; NaN where there are too few units for an interval.
        high: the upper end.
        level: the confidence level, between 0 and 1.
        n: how many independent units (pairs, groups) it rests on.
        method: "bootstrap" (studentised), "t" (Student), "bootstrap and t" (at each end the wider of the two),
            "fisher", or "none" where there is no interval.
    """

    mean: float
    low: float
    high: float
    level: float
    n: int
    method: str

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the interval; False where there is no interval."""
        return self.low > value or self.high < value

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def paired_interval(
    a: ArrayLike,
    b: ArrayLike | None = None,
    *,
    level: float = 0.95,
    method: IntervalMethod = "auto",
    n_resamples: int = 9999,
    seed: int = 0,
) -> Interval:
    """The mean of paired differences `a - b` and its confidence interval.

    Args:
        a: one number a pair, or the differences themselves where `b` is left out.
        b: the other number of each pair, in the same order.
        level: the confidence level.
        method: "bootstrap" is the studentised bootstrap, "t" is Student's t. "auto" takes, from 8 to 2000 pairs, the
            wider of the two at each end (the bootstrap alone covers too seldom under heavy symmetric tails, t alone
            under skew), and Student's t outside that range. Data with so many ties that resamples have no spread get
            Student's t whatever is asked; the result says which was used.
        n_resamples: how many resamples the bootstrap draws.
        seed: of the resampling only.

    Returns:
        The interval, in the unit of the differences.

    Raises:
        InputError: no pairs, unequal lengths, or a value that is not finite.

    Source:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 12.5.

    >>> paired_interval([3.0, 4.0, 6.0], [1.0, 1.0, 2.0], method="t").mean
    3.0
    """
    d = _differences(a, b)
    return _ratio_of_sums(d, np.ones_like(d), level, method, n_resamples, seed)


def mean_interval(
    values: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    level: float = 0.95,
    method: IntervalMethod = "auto",
    n_resamples: int = 9999,
    seed: int = 0,
) -> Interval:
    """The mean and its confidence interval; with `groups`, values of one group count as dependent.

    A mean over tokens with the windows they come from as `groups` is the plain mean over all tokens, and its interval
    rests on the number of windows.

    Args:
        values: one number each.
        groups: the group of each value (integers or strings); whole groups are the unit of the interval.
        level: the confidence level.
        method: as for `paired_interval`.
        n_resamples: how many resamples the bootstrap draws.
        seed: of the resampling only.

    Raises:
        InputError: no values, unequal lengths, or a value that is not finite.

    >>> mean_interval([1.0, 2.0, 3.0, 10.0], groups=["a", "a", "a", "b"]).n
    2
    """
    x = _values(values, "values")
    if groups is None:
        return _ratio_of_sums(x, np.ones_like(x), level, method, n_resamples, seed)
    labels = np.asarray(groups.cpu() if hasattr(groups, "cpu") else groups).reshape(-1)
    if labels.size != x.size:
        raise InputError(f"groups has {labels.size} labels for {x.size} values: give one a value")
    _, index = np.unique(labels, return_inverse=True)
    return _ratio_of_sums(
        np.bincount(index, x), np.bincount(index).astype(np.float64), level, method, n_resamples, seed
    )


def ratio_interval(
    a: ArrayLike,
    b: ArrayLike,
    *,
    level: float = 0.95,
    method: IntervalMethod = "auto",
    n_resamples: int = 9999,
    seed: int = 0,
) -> Interval:
    """The ratio of the means of two paired positive samples, `mean(a) / mean(b)`, with an interval on the log scale.

    Args:
        a: the numerators, such as the seconds of one arm, one a seed.
        b: the denominators, in the same order.
        level: the confidence level.
        method: as for `paired_interval`.
        n_resamples: how many resamples the bootstrap draws.
        seed: of the resampling only.

    Raises:
        InputError: no pairs, unequal lengths, or a value that is not finite and positive.

    >>> ratio_interval([2.0, 4.0], [1.0, 2.0]).mean
    2.0
    """
    top, bottom = _pairs(a, b, "a", "b")
    if min(top.min(), bottom.min()) <= 0:
        raise InputError("a ratio needs positive values in a and b")
    return _ratio_of_sums(top, bottom, level, method, n_resamples, seed, log=True)


def effect_size(a: ArrayLike, b: ArrayLike | None = None) -> float:
    """Cohen's d of paired differences (d_z), with Hedges' small-sample correction.

    Args:
        a: one number a pair, or the differences themselves where `b` is left out.
        b: the other number of each pair.

    Returns:
        The mean difference in standard deviations of the differences; 0 where all differences are 0, signed
        infinity where they are equal and not 0, NaN for fewer than three pairs (the correction of two is 0).

    Source:
        Hedges, Distribution Theory for Glass's Estimator of Effect Size and Related Estimators (1981), eq. 6e.

    >>> round(effect_size([1.0, 2.0, 3.0]), 4)
    1.1284
    """
    d = _differences(a, b)
    if d.size < 3:
        return float("nan")
    if _constant(d, np.abs(d).max()):
        return 0.0 if d.mean() == 0 else float(np.copysign(np.inf, d.mean()))
    df = d.size - 1
    correction = np.exp(gammaln(df / 2) - gammaln((df - 1) / 2)) / np.sqrt(df / 2)
    return float(correction * d.mean() / d.std(ddof=1))


def pearson(x: ArrayLike, y: ArrayLike, *, level: float = 0.95) -> Interval:
    """Pearson's correlation with Fisher's interval.

    Args:
        x: one number a pair.
        y: the other number of each pair.
        level: the confidence level.

    Returns:
        The correlation; NaN where one side is constant. The ends are NaN for fewer than four pairs.

    Raises:
        InputError: fewer than two pairs, unequal lengths, or a value that is not finite.

    >>> pearson([1, 2, 3, 4], [1, 3, 2, 4]).mean
    0.8
    """
    u, v = _pairs(x, y, "x", "y")
    if u.size < 2:
        raise InputError("x has 1 value: a correlation needs at least two pairs")
    _check_level(level)
    nan = float("nan")
    if _constant(u, np.abs(u).max()) or _constant(v, np.abs(v).max()):
        return Interval(nan, nan, nan, level, u.size, "none")
    # Scaled before the product, so that values near the ends of float64 neither overflow nor vanish.
    u, v = u - u.mean(), v - v.mean()
    u, v = u / np.abs(u).max(), v / np.abs(v).max()
    r = float(np.clip(u @ v / np.sqrt((u @ u) * (v @ v)), -1.0, 1.0))
    if u.size < 4:
        return Interval(r, nan, nan, level, u.size, "none")
    if abs(r) == 1.0:
        return Interval(r, r, r, level, u.size, "fisher")
    half = float(ndtri(0.5 + level / 2)) / np.sqrt(u.size - 3)
    z = np.arctanh(r)
    return Interval(r, float(np.tanh(z - half)), float(np.tanh(z + half)), level, u.size, "fisher")


def _values(values: Any, name: str) -> Float[np.ndarray, "n"]:
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if array.size == 0:
        raise InputError(f"{name} is empty: give at least one value")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise InputError(f"{name} has {bad.size} values that are not finite (first at {bad[0]}): leave them out")
    return array


def _pairs(
    a: ArrayLike, b: ArrayLike, a_name: str, b_name: str
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    first, second = _values(a, a_name), _values(b, b_name)
    if first.shape != second.shape:
        raise InputError(f"{a_name} has {first.size} values and {b_name} has {second.size}: give one of each per pair")
    return first, second


def _differences(a: ArrayLike, b: ArrayLike | None) -> Float[np.ndarray, "n"]:
    if b is None:
        return _values(a, "a")
    first, second = _pairs(a, b, "a", "b")
    return first - second


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InputError(f"level is {level}: give a confidence level between 0 and 1, such as 0.95")


def _constant(values: Float[np.ndarray, "n"], size: float) -> bool:
    """Whether values differ by no more than the rounding of numbers of this size."""
    return bool(np.ptp(values) <= 8 * np.finfo(np.float64).eps * size)


def _ratio_of_sums(
    top: Float[np.ndarray, "n"],
    bottom: Float[np.ndarray, "n"],
    level: float,
    method: IntervalMethod,
    n_resamples: int,
    seed: int,
    *,
    log: bool = False,
) -> Interval:
    """The interval of sum(top) / sum(bottom) over independent units.

    One estimator serves means (bottom = 1), means over groups (sums and counts) and ratios. Its standard error
    is the linearised one, sqrt(n / (n - 1) * sum((top - R * bottom)^2)) / sum(bottom): for a mean, s / sqrt(n).
    """
    _check_level(level)
    if method not in ("auto", "bootstrap", "t"):
        raise InputError(f"method is {method!r}: choose auto, bootstrap or t")
    n = top.size
    # Centred before dividing: a mean of equal values is then that value, to the last digit.
    centre = float(top[0] / bottom[0])
    estimate = float(centre + (top - centre * bottom).sum() / bottom.sum())
    residual = top - estimate * bottom
    if n < 2:
        return Interval(estimate, float("nan"), float("nan"), level, n, "none")
    if _constant(residual, np.abs(top).max()):
        return Interval(estimate, estimate, estimate, level, n, "t")
    se = float(np.sqrt(n / (n - 1) * (residual @ residual)) / bottom.sum())
    scale = se / estimate if log else se  # standard error of log R by the delta method

    tails = np.array([(1 - level) / 2, (1 + level) / 2])
    use_bootstrap = method == "bootstrap" or (method == "auto" and MIN_BOOTSTRAP <= n <= MAX_BOOTSTRAP)
    quantiles, used = stdtrit(n - 1, tails), "t"
    if use_bootstrap:
        if n_resamples < 100:
            raise InputError(f"n_resamples is {n_resamples}: the bootstrap needs at least 100")
        studentised = _studentised(residual, bottom, estimate, n_resamples, seed, log)
        # More resamples without spread than a hundredth of a tail would set the tail by themselves.
        if np.isfinite(studentised).mean() > 1 - tails[0] / 5:
            drawn = np.quantile(studentised, tails, method="hazen")
            if method == "bootstrap":
                quantiles, used = drawn, "bootstrap"
            else:
                quantiles = np.array([min(drawn[0], quantiles[0]), max(drawn[1], quantiles[1])])
                used = "bootstrap and t"
    low, high = -quantiles[1] * scale, -quantiles[0] * scale
    if log:
        return Interval(estimate, estimate * float(np.exp(low)), estimate * float(np.exp(high)), level, n, used)
    return Interval(estimate, float(estimate + low), float(estimate + high), level, n, used)


def _studentised(
    residual: Float[np.ndarray, "n"],
    bottom: Float[np.ndarray, "n"],
    estimate: float,
    n_resamples: int,
    seed: int,
    log: bool,
) -> Float[np.ndarray, "resamples"]:
    """(R* - R) / se* over resamples; infinite where a resample has no spread."""
    n = residual.size
    rng = np.random.default_rng(seed)
    step = max(1, _CHUNK // n)
    parts = []
    for start in range(0, n_resamples, step):
        index: Integer[np.ndarray, "resamples n"] = rng.integers(
            n, size=(min(step, n_resamples - start), n), dtype=np.int32
        )
        e, d = residual[index], bottom[index]
        shift = e.sum(1) / d.sum(1)
        e -= shift[:, None] * d
        squares = np.einsum("ij,ij->i", e, e)
        se = np.sqrt(n / (n - 1) * squares) / d.sum(1)
        flat = squares <= 1e-24 * (residual @ residual)
        if log:
            shift, se = np.log1p(shift / estimate), se / (estimate + shift)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = shift / se
        t[flat] = np.inf
        parts.append(t)
    return np.concatenate(parts)
