"""Does it grow? A bound on the slope, against a control arm; never a p-value, and never from two points.

Counters are read at quiesced moments after the same work. The control arm is a twin process that runs the fixed reference
workload alone, read at the same moments: the difference of the two series holds what the load does and not what the
interpreter, the C library or the measuring does. A control that grows by itself is said so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Interval, Verdict

GATE_LEVEL = 0.998
"""Two-sided; each bound is missed once in a thousand. A soak is asked about half a dozen counters, a release about many soaks."""
WARM_UP_RATIO = 0.25
"""Share of the readings at the start that is left out: pools and allocators fill then."""
MIN_POINTS = 8
MAX_POINTS = 1500
"""More readings are thinned out evenly: the slopes between all pairs of 1500 take a second."""
_SIGNIFICANT = 1.96
"""Autocorrelations within this many standard errors of zero are noise (two-sided 5 %, Hamed and Rao 1998)."""
_MAX_LAG_RATIO = 0.25


@dataclass(frozen=True, slots=True)
class Trend:
    """A slope per hour with its bounds."""

    per_hour: float
    lower: float
    upper: float
    num_points: int
    variance_factor: float
    """By how much autocorrelation widened the variance of the sign statistic; 1 for independent noise."""

    def interval(self) -> Interval:
        return Interval(lower=self.lower, upper=self.upper, level=GATE_LEVEL)

    def verdict(self, budget_per_hour: float) -> Verdict:
        """Return ACCEPT where the upper bound keeps the budget, REJECT where the lower one breaks it."""
        if self.upper <= budget_per_hour:
            return Verdict.ACCEPT
        return Verdict.REJECT if self.lower > budget_per_hour else Verdict.INCONCLUSIVE


def trend(hours: Sequence[float], values: Sequence[float], *, level: float = GATE_LEVEL) -> Trend | None:
    """Return the Theil-Sen slope with Sen's bounds, widened for autocorrelated noise; None for fewer than `MIN_POINTS`.

    Source: Sen, Estimates of the regression coefficient based on Kendall's tau, JASA 63, 1968; the factor on the variance of
    S: Hamed and Rao, A modified Mann-Kendall trend test for autocorrelated data, J. Hydrology 204, 1998, eq. 6.
    """
    from scipy.stats import norm

    x, y = _thinned(np.asarray(hours, np.float64)), _thinned(np.asarray(values, np.float64))
    n = x.size
    if n < MIN_POINTS or np.ptp(x) == 0:
        return None
    left, right = np.triu_indices(n, 1)
    apart = x[right] - x[left]
    slopes = np.sort((y[right] - y[left])[apart > 0] / apart[apart > 0])
    slope = float(np.median(slopes))
    factor = _variance_factor(y - slope * x)
    spread = float(norm.ppf((1 + level) / 2)) * np.sqrt(factor * n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, int(np.floor((slopes.size - spread) / 2)))
    high = min(slopes.size - 1, int(np.ceil((slopes.size + spread) / 2)))
    return Trend(slope, float(slopes[low]), float(slopes[high]), n, factor)


def judge(hours: Sequence[float], values: Sequence[float], budget_per_hour: float) -> tuple[Trend, Verdict] | None:
    """Return the slope after warm-up and its verdict; None for too few readings.

    A leak goes on: where the whole rises and the second half alone keeps the budget, something filled up and stopped. Where
    the second half cannot tell, neither can this.
    """
    start = int(len(hours) * WARM_UP_RATIO)
    whole = trend(hours[start:], values[start:])
    if whole is None:
        return None
    verdict = whole.verdict(budget_per_hour)
    if verdict is Verdict.ACCEPT:
        return whole, verdict
    middle = start + (len(hours) - start) // 2
    late = trend(hours[middle:], values[middle:])
    if late is None:
        return whole, Verdict.INCONCLUSIVE
    again = late.verdict(budget_per_hour)
    if again is Verdict.ACCEPT:
        return late, again
    return whole, Verdict.REJECT if verdict is again is Verdict.REJECT else Verdict.INCONCLUSIVE


def _thinned(values: NDArray[np.float64]) -> NDArray[np.float64]:
    if values.size <= MAX_POINTS:
        return values
    return values[np.linspace(0, values.size - 1, MAX_POINTS).round().astype(np.int64)]


def _variance_factor(residuals: NDArray[np.float64]) -> float:
    """Return 1 + 2 / (n (n - 1) (n - 2)) sum_k (n - k) (n - k - 1) (n - k - 2) rho_k over the ranks' significant lags, >= 1."""
    from scipy.stats import rankdata

    n = residuals.size
    ranks = rankdata(residuals)
    ranks -= ranks.mean()
    power = float(ranks @ ranks)
    if power == 0:
        return 1.0
    total = 0.0
    for lag in range(1, max(2, int(n * _MAX_LAG_RATIO))):
        rho = float(ranks[:-lag] @ ranks[lag:]) / power
        if abs(rho) > _SIGNIFICANT / np.sqrt(n):
            total += (n - lag) * (n - lag - 1) * (n - lag - 2) * rho
    return max(1.0, 1 + 2 * total / (n * (n - 1) * (n - 2)))
