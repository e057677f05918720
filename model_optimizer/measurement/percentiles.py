"""Quantiles with order-statistic intervals: no assumption on the distribution, and no bound where n is too small."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Interval
from model_optimizer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Quantile:
    """A sample quantile; a bound is None where the sample is too small to give it."""

    value: float
    lower: float | None
    upper: float | None
    level: float
    num_samples: int

    def interval(self) -> Interval | None:
        """Return the interval where both bounds are finite."""
        if self.lower is None or self.upper is None:
            return None
        return Interval(lower=self.lower, upper=self.upper, level=self.level)


def quantile(samples: NDArray[np.float64], ratio: float, *, level: float = 0.95) -> Quantile:
    """Return the `ratio` quantile (0.5 = median) with a two-sided interval from the binomial law of ranks.

    The share of samples below the true quantile is Binomial(n, ratio), so the order statistics of rank
    l = ppf(tail) and u = ppf(1 - tail) + 1 enclose it with probability of at
    least `level`, whatever the law of the samples, provided that they are independent.

    Source: David and Nagaraja, Order Statistics, 3rd ed., section 7.1.

    Raises:
        ConfigError: no samples.
    """
    from scipy.stats import binom

    if samples.size == 0:
        raise ConfigError("a quantile needs at least one sample; seen: none")
    ordered, tail = np.sort(samples), (1 - level) / 2
    low, high = int(binom.ppf(tail, ordered.size, ratio)), int(binom.ppf(1 - tail, ordered.size, ratio)) + 1
    return Quantile(
        value=float(np.quantile(ordered, ratio)),
        lower=float(ordered[low - 1]) if low >= 1 else None,
        upper=float(ordered[high - 1]) if high <= ordered.size else None,
        level=level,
        num_samples=ordered.size,
    )


def samples_for_upper_bound(ratio: float, *, level: float = 0.95) -> int:
    """Return how many samples give the `ratio` quantile a finite one-sided upper bound: ratio^n <= 1 - level.

    P99 at 95 %: 299. P95: 59.
    """
    return int(np.ceil(np.log(1 - level) / np.log(ratio)))
