"""Paired non-inferiority: is the candidate worse than the baseline by less than a margin, on the same items?

The gate is one-sided at `alpha`: ACCEPT when the lower confidence bound of candidate - baseline lies above
-margin, REJECT when the upper one lies below it, INCONCLUSIVE otherwise. At a true loss of exactly the margin
it passes with probability alpha.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Interval, Verdict
from model_optimizer.errors import ConfigError

BISECTIONS = 60
"""Halvings of [-1, 1]: the bounds are exact to 2^-59."""
NUM_RESAMPLES = 2000
RESAMPLE_CHUNK = 4_000_000
"""Places drawn at once: 32 MB, whatever the number of clusters."""


@dataclass(frozen=True, slots=True)
class Flips:
    """Paired binary outcomes, counted. Counts may be fractions where clustering shrank the sample."""

    num_items: float
    num_gained: float
    """Wrong for the baseline, right for the candidate."""
    num_lost: float

    @property
    def difference(self) -> float:
        return (self.num_gained - self.num_lost) / self.num_items

    @property
    def discordance(self) -> float:
        """Return the expected share of flips, (flips + 1) / (n + 2): never zero, so that planning stays possible."""
        return (self.num_gained + self.num_lost + 1) / (self.num_items + 2)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gate says and what it rests on."""

    verdict: Verdict
    difference: float
    interval: Interval
    """95 %, two-sided: for reading."""
    lower: float
    upper: float
    """One-sided bounds at 1 - alpha each: what the verdict uses."""
    mde: float
    samples_needed: int


def tango_statistic(
    gained: NDArray[np.float64], lost: NDArray[np.float64], num_items: NDArray[np.float64], difference: float
) -> NDArray[np.float64]:
    """Return the score statistic of H0: p_gained - p_lost = `difference`; standard normal under H0, falling in `difference`.

    With b gained, c lost of n: (b - c - n d) / sqrt(n (2 q + d (1 - d))), where q is the maximum-likelihood p_lost under H0:
    the larger root of 2n q^2 - (b + c - (2n - b + c) d) q - c d (1 - d) = 0.

    Source: Tango, Equivalence test and confidence interval for the difference in proportions for the paired-sample design,
    Statistics in Medicine 17, 1998.
    """
    n, d = num_items, difference
    linear = (2 * n - gained + lost) * d - gained - lost
    root = np.sqrt(np.maximum(linear * linear + 8 * n * lost * d * (1 - d), 0.0))
    q = np.maximum((root - linear) / (4 * n), max(0.0, -d))  # p_lost >= -difference, else p_gained is negative
    variance = n * (2 * q + d * (1 - d))
    top = gained - lost - n * d
    safe = np.sqrt(np.where(variance > 0, variance, 1.0))
    certain = np.where(top == 0, 0.0, np.copysign(np.inf, top))
    return np.asarray(np.where(variance > 0, top / safe, certain), dtype=np.float64)


def tango_bound(flips: Flips, z: float) -> float:
    """Return the difference at which the score statistic equals `z`: the lower bound for z > 0, the upper for z < 0."""
    low, high = -1.0, 1.0
    counts = [np.array([value]) for value in (flips.num_gained, flips.num_lost, flips.num_items)]
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if tango_statistic(counts[0], counts[1], counts[2], middle)[0] > z:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def tango_interval(flips: Flips, level: float = 0.95) -> Interval:
    """Return the two-sided score interval of the paired difference, inside [-1, 1]."""
    z = normal_quantile((1 + level) / 2)
    return Interval(lower=tango_bound(flips, z), upper=tango_bound(flips, -z), level=level)


def decide(flips: Flips, margin: float, *, alpha: float, power: float) -> Decision:
    """Judge non-inferiority of paired binary outcomes.

    Raises:
        ConfigError: no items, or a margin that is not positive.
    """
    if flips.num_items <= 0 or margin <= 0:
        raise ConfigError(f"non-inferiority needs items and a positive margin; seen: {flips.num_items} items, margin {margin}")
    z = normal_quantile(1 - alpha)
    lower, upper = tango_bound(flips, z), tango_bound(flips, -z)
    verdict = Verdict.ACCEPT if lower > -margin else Verdict.REJECT if upper < -margin else Verdict.INCONCLUSIVE
    missing = 0
    if verdict is Verdict.INCONCLUSIVE:
        # Planned for the effect seen so far; on the very edge of the margin no number would do, so a quarter of it is the least.
        effect = min(margin, max(abs(margin + flips.difference), margin / 4))
        missing = max(1, samples_needed(flips.discordance, effect, alpha=alpha, power=power) - math.floor(flips.num_items))
    return Decision(
        verdict=verdict,
        difference=flips.difference,
        interval=tango_interval(flips),
        lower=lower,
        upper=upper,
        mde=minimum_detectable_effect(flips.discordance, flips.num_items, alpha=alpha, power=power),
        samples_needed=missing,
    )


def samples_needed(discordance: float, effect: float, *, alpha: float, power: float) -> int:
    """Return n = d (z_alpha + z_beta)^2 / effect^2, the pairs that a one-sided test needs.

    d is the share of items whose outcome differs. d = 0.02, effect = 0.003, alpha = 0.05, power = 0.8: 13,739.

    Source: Connor, Sample size for testing differences in proportions for the paired-sample design, Biometrics 43, 1987.
    """
    return math.ceil(discordance * _z_sum(alpha, power) ** 2 / effect**2)


def minimum_detectable_effect(discordance: float, num_items: float, *, alpha: float, power: float) -> float:
    """Return the effect for which `num_items` are enough: the inverse of `samples_needed`."""
    return _z_sum(alpha, power) * math.sqrt(discordance / num_items)


def mcnemar_p_value(num_gained: int, num_lost: int) -> float:
    """Return the exact two-sided McNemar p-value; a description only, for a large p is no proof of equality.

    Source: McNemar, Note on the sampling error of the difference between correlated proportions, Psychometrika 12, 1947.
    """
    from scipy.stats import binomtest

    total = num_gained + num_lost
    return float(binomtest(num_gained, total, 0.5).pvalue) if total else 1.0


def design_effect(differences: NDArray[np.float64], clusters: Sequence[str]) -> float:
    """Return by how much clustering inflates the variance of the mean difference, at least 1.

    The ratio of the cluster-robust variance, sum over clusters of (sum of residuals)^2, to the independent one, the
    sum of residuals^2.

    Source: Miller, Adding Error Bars to Evals, arXiv 2411.00640, section 2.2.
    """
    residuals = differences - differences.mean()
    independent = float((residuals**2).sum())
    if independent == 0 or len(set(clusters)) == len(clusters):
        return 1.0
    totals: dict[str, float] = {}
    for cluster, residual in zip(clusters, residuals, strict=True):
        totals[cluster] = totals.get(cluster, 0.0) + float(residual)
    return max(1.0, sum(total**2 for total in totals.values()) / independent)


def cluster_bootstrap(sums: NDArray[np.float64], counts: NDArray[np.float64], *, seed: int, level: float = 0.95) -> Interval:
    """Return a percentile interval of sum(sums) / sum(counts), whole clusters (here: texts) drawn with replacement.

    sums, counts: float64 [clusters]; e.g. the summed differences of log-probability and the token count of every text.
    """
    generator = np.random.default_rng(seed)
    means, rows = list[NDArray[np.float64]](), max(1, RESAMPLE_CHUNK // sums.size)
    for first in range(0, NUM_RESAMPLES, rows):
        drawn = generator.integers(0, sums.size, size=(min(rows, NUM_RESAMPLES - first), sums.size))
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    lower, upper = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(lower=float(lower), upper=float(upper), level=level)


def normal_quantile(probability: float) -> float:
    """Return the standard normal quantile."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)


def _z_sum(alpha: float, power: float) -> float:
    return normal_quantile(1 - alpha) + normal_quantile(power)
