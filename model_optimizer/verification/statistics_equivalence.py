"""Two one-sided tests for paired binary items: neither worse nor better than the baseline by more than the margin.

Non-inferiority (`statistics.decide`) is the release gate; equivalence is for changes that must not move the score at
all, e.g. another runtime for the same weights.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Interval, Verdict
from model_optimizer.errors import ConfigError
from model_optimizer.verification.statistics import Flips, mcnemar_p_value, tango_bound, tango_interval, tango_statistic
from model_optimizer.verification.statistics_plan import Plan


@dataclass(frozen=True, slots=True)
class Equivalence:
    """What the two tests say and what they rest on."""

    verdict: Verdict
    """ACCEPT: the difference lies within the margin. REJECT: beyond it, on either side."""
    difference: float
    interval: Interval
    """At 1 - 2 alpha: inside (-margin, margin) exactly when both tests reject."""
    p_lower: float
    """Of H0: difference <= -margin."""
    p_upper: float
    """Of H0: difference >= margin."""
    samples_needed: int
    """Further items to plan while INCONCLUSIVE."""

    @property
    def p_value(self) -> float:
        """Return the p-value of non-equivalence, the greater of the two."""
        return max(self.p_lower, self.p_upper)


@dataclass(frozen=True, slots=True)
class FlipSummary:
    """What moved between two engines on the same items; a description, never a verdict."""

    flips: Flips
    flip_ratio: float
    mcnemar_p: float
    """Exact; a large value is no proof of equality."""
    interval: Interval
    """95 % score interval of the difference."""


def count_flips(baseline_N: NDArray[np.bool_], candidate_N: NDArray[np.bool_]) -> Flips:
    """Count gained and lost items of paired outcomes.

    Raises:
        ConfigError: no items, or unequal numbers.
    """
    if baseline_N.shape != candidate_N.shape or baseline_N.size == 0:
        raise ConfigError(f"paired outcomes need the same items on both sides; seen: {baseline_N.size} and {candidate_N.size}")
    gained, lost = int((candidate_N & ~baseline_N).sum()), int((baseline_N & ~candidate_N).sum())
    return Flips(baseline_N.size, gained, lost)


def describe_flips(flips: Flips) -> FlipSummary:
    """Return flips, McNemar's exact p and the score interval, for showing."""
    moved = flips.num_gained + flips.num_lost
    p_value = mcnemar_p_value(round(flips.num_gained), round(flips.num_lost))
    return FlipSummary(flips, moved / flips.num_items, p_value, tango_interval(flips))


def score_p_value(flips: Flips, difference: float, *, worse: bool = False) -> float:
    """Return the one-sided score p-value of H0: the true difference is at most `difference` (`worse`: at least).

    Source: Tango, Statistics in Medicine 17, 1998 (the statistic of `tango_statistic`).
    """
    counts = [np.array([float(count)]) for count in (flips.num_gained, flips.num_lost, flips.num_items)]
    z = float(tango_statistic(counts[0], counts[1], counts[2], difference)[0])
    return _upper_tail(-z if worse else z)


def judge_equivalence(flips: Flips, plan: Plan) -> Equivalence:
    """Judge whether paired binary outcomes differ by less than the margin, at level alpha.

    Source: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987; Liu et al., Tests for equivalence or
    non-inferiority for paired binary data, Statistics in Medicine 21, 2002.

    Raises:
        ConfigError: no items.
    """
    if flips.num_items <= 0:
        raise ConfigError(f"equivalence needs items; seen: {flips.num_items}")
    lower, upper = tango_bound(flips, plan.z_alpha), tango_bound(flips, -plan.z_alpha)
    if -plan.margin < lower and upper < plan.margin:
        verdict = Verdict.ACCEPT
    elif upper < -plan.margin or lower > plan.margin:
        verdict = Verdict.REJECT
    else:
        verdict = Verdict.INCONCLUSIVE
    missing = 0
    if verdict is Verdict.INCONCLUSIVE:
        missing = max(1, plan.items_equivalence(flips.discordance) - math.floor(flips.num_items))
    return Equivalence(
        verdict=verdict,
        difference=flips.difference,
        interval=Interval(lower=lower, upper=upper, level=1 - 2 * plan.alpha),
        p_lower=score_p_value(flips, -plan.margin),
        p_upper=score_p_value(flips, plan.margin, worse=True),
        samples_needed=missing,
    )


def _upper_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2))
