"""Ratios of interleaved pairs: neighbours in time share the machine's mood, so their ratio does not."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from model_optimizer.artifacts.measure import Interval
from model_optimizer.errors import ConfigError

NUM_RESAMPLES = 2000


class Ratio(BaseModel):
    """The median of paired ratios with a bootstrap interval."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    interval: Interval
    num_pairs: int


def ratio_of_pairs(numerators: Sequence[float], denominators: Sequence[float], *, seed: int, level: float = 0.95) -> Ratio:
    """Return the median of `numerators[i] / denominators[i]` with a seeded percentile bootstrap over the pairs.

    Below 6 pairs the interval is in effect their range, which holds the median with probability 1 - 2^(1 - n) only
    (5 pairs: 0.9375).

    Raises:
        ConfigError: fewer than two pairs, unequal numbers, or a value that is not positive.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if top.shape != bottom.shape or top.size < 2 or not (np.all(top > 0) and np.all(bottom > 0)):
        raise ConfigError(f"paired ratios need two or more pairs of positive values; seen: {top.tolist()} over {bottom.tolist()}")
    ratios = top / bottom
    medians = np.median(_resamples(ratios, seed), axis=1)
    return Ratio(value=float(np.median(ratios)), interval=_interval(medians, level), num_pairs=ratios.size)


def welch_on_logs(baseline: Sequence[float], candidate: Sequence[float], *, level: float = 0.95) -> tuple[float, Interval, float]:
    """Return the ratio of geometric means candidate / baseline, its interval and Welch's two-sided p: a description only.

    For unpaired values of a canary and its control. It supposes independent values, and a large p is no proof of equality.

    Source: Welch, The generalization of Student's problem, Biometrika 34, 1947 (scipy.stats.ttest_ind).

    Raises:
        ConfigError: fewer than two values on a side, or one that is not positive.
    """
    from scipy.stats import ttest_ind

    sides = [np.asarray(side, dtype=np.float64) for side in (candidate, baseline)]
    if min(side.size for side in sides) < 2 or not all((side > 0).all() for side in sides):
        raise ConfigError(f"Welch on logs needs two or more positive values a side; seen: {sides[1].size} and {sides[0].size}")
    top, bottom = (np.log(side) for side in sides)
    found = ttest_ind(top, bottom, equal_var=False)
    bounds = np.exp(found.confidence_interval(level))
    ratio = float(np.exp(top.mean() - bottom.mean()))
    return ratio, Interval(lower=float(bounds[0]), upper=float(bounds[1]), level=level), float(found.pvalue)


def bootstrap_mean(values: Sequence[float], *, seed: int, level: float = 0.95) -> tuple[float, Interval]:
    """Return the mean of independent values with a seeded percentile bootstrap interval."""
    sample = np.asarray(values, dtype=np.float64)
    return float(sample.mean()), _interval(_resamples(sample, seed).mean(axis=1), level)


def _resamples(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return [NUM_RESAMPLES, n] draws with replacement."""
    generator = np.random.default_rng(seed)
    return values[generator.integers(0, values.size, size=(NUM_RESAMPLES, values.size))]


def _interval(statistics: NDArray[np.float64], level: float) -> Interval:
    lower, upper = np.quantile(statistics, [(1 - level) / 2, (1 + level) / 2])
    return Interval(lower=float(lower), upper=float(upper), level=level)
