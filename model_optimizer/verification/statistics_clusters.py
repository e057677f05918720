"""Paired comparison of scores that are no simple yes or no: F1, EM and ROUGE by document, perplexity by text.

Items of one document are not independent, so whole clusters are drawn with replacement, the same ones for both
engines. Every score here is a ratio of sums over clusters: a mean is sum of values over number of items, corpus F1 is
2 TP over 2 TP + FP + FN, log-perplexity is negative log-probability over tokens.

Shapes: C clusters, N items, R resamples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Interval, Verdict
from model_optimizer.errors import ConfigError
from model_optimizer.verification.statistics import Decision, normal_quantile
from model_optimizer.verification.statistics_plan import Plan

if TYPE_CHECKING:
    from scipy.stats._resampling import BootstrapResult

NUM_RESAMPLES = 2000
MAX_BCA_CLUSTERS = 500
"""The jackknife of BCa costs C^2; beyond this its correction, of order 1 / sqrt(C), is below the noise of resampling."""
MIN_CLUSTERS = 20
"""Fewer clusters than this show too little of their own spread: no verdict."""
BATCH_VALUES = 2_000_000


@dataclass(frozen=True, slots=True, eq=False)
class ClusterSums:
    """One engine's score as sum(numerators) / sum(denominators).

    Raises:
        ConfigError: no clusters, unequal numbers, or denominators that are negative or all zero.
    """

    numerators_C: NDArray[np.float64]
    denominators_C: NDArray[np.float64]

    def __post_init__(self) -> None:
        same = self.numerators_C.shape == self.denominators_C.shape and self.numerators_C.size > 0
        if not same or (self.denominators_C < 0).any() or self.denominators_C.sum() <= 0:
            raise ConfigError(
                "a score by clusters needs as many numerators as denominators, none negative, not all zero; "
                f"seen: {self.numerators_C.size} and {self.denominators_C.size}, summing to {self.denominators_C.sum():g}"
            )

    @property
    def score(self) -> float:
        return float(self.numerators_C.sum() / self.denominators_C.sum())

    @classmethod
    def of_means(cls, values_N: NDArray[np.float64], clusters: Sequence[str]) -> "ClusterSums":
        """Return the mean of a score per item (EM, token F1, ROUGE-L) by cluster, in the order of the clusters' names."""
        return cls(sum_by_cluster(values_N, clusters), sum_by_cluster(np.ones(values_N.size), clusters))

    @classmethod
    def of_f1(
        cls,
        true_positives_N: NDArray[np.float64],
        predicted_N: NDArray[np.float64],
        expected_N: NDArray[np.float64],
        clusters: Sequence[str],
    ) -> "ClusterSums":
        """Return corpus F1, 2 TP / (predicted + expected), from counts per item."""
        return cls(sum_by_cluster(2 * true_positives_N, clusters), sum_by_cluster(predicted_N + expected_N, clusters))


@dataclass(frozen=True, slots=True)
class Change:
    """Candidate minus baseline with what is needed to judge it."""

    baseline: float
    candidate: float
    difference: float
    interval: Interval
    """95 %, two-sided."""
    lower: float
    upper: float
    """One-sided bounds at 1 - alpha each."""
    standard_error: float
    """By linearisation, clusters independent."""
    num_clusters: int


def sum_by_cluster(values_N: NDArray[np.float64], clusters: Sequence[str]) -> NDArray[np.float64]:
    """Return sums per distinct cluster, [C], sorted by its name.

    Raises:
        ConfigError: unequal numbers.
    """
    if values_N.size != len(clusters):
        raise ConfigError(f"every item needs its cluster; seen: {values_N.size} items, {len(clusters)} clusters")
    _, places = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True)
    return np.asarray(np.bincount(places, weights=values_N), dtype=np.float64)


def compare_clusters(baseline: ClusterSums, candidate: ClusterSums, plan: Plan, *, seed: int) -> Change:
    """Return the paired change of a ratio score by a seeded bootstrap over clusters: BCa, percentile for many clusters.

    Source: Efron, Better bootstrap confidence intervals, JASA 82, 1987 (scipy.stats.bootstrap); Miller, Adding Error
    Bars to Evals, arXiv 2411.00640, sections 2.2 and 3 (clusters, pairing).

    Raises:
        ConfigError: other numbers of clusters on the two sides, or fewer than two.
    """
    from scipy.stats import bootstrap

    if (num := baseline.numerators_C.size) != candidate.numerators_C.size or num < 2:
        raise ConfigError(f"paired scores need the same two or more clusters; seen: {num} and {candidate.numerators_C.size}")
    error, difference = standard_error(baseline, candidate), candidate.score - baseline.score
    shown, sided = (difference, difference), (difference, difference)
    if error > 0:
        columns = (baseline.numerators_C, baseline.denominators_C, candidate.numerators_C, candidate.denominators_C)
        method = "BCa" if num <= MAX_BCA_CLUSTERS else "percentile"
        batch = max(1, BATCH_VALUES // num)
        generator = np.random.default_rng(seed)
        drawn = bootstrap(
            columns, _difference, paired=True, vectorized=True, method=method, batch=batch,
            n_resamples=NUM_RESAMPLES, rng=generator,
        )  # fmt: skip
        again = bootstrap(
            columns, _difference, paired=True, vectorized=True, method=method, batch=batch,
            n_resamples=0, bootstrap_result=drawn, confidence_level=1 - 2 * plan.alpha,
        )  # fmt: skip
        shown, sided = _bounds(drawn, 0.95), _bounds(again, 1 - 2 * plan.alpha)
    return Change(
        baseline=baseline.score,
        candidate=candidate.score,
        difference=difference,
        interval=Interval(lower=shown[0], upper=shown[1]),
        lower=sided[0],
        upper=sided[1],
        standard_error=error,
        num_clusters=num,
    )


def judge_change(change: Change, plan: Plan, *, higher_is_better: bool = True) -> Decision:
    """Judge non-inferiority of a change within the margin, in the score's own unit (nats for log-perplexity).

    Fewer than 20 clusters are INCONCLUSIVE, and so are any in which nothing changed as long as a change of up to 1 in
    the unseen rest could exceed the margin: 1 - alpha^(1 / C) of clusters may still differ.
    """
    sign = 1.0 if higher_is_better else -1.0
    lower, upper = sorted((sign * change.lower, sign * change.upper))
    difference = sign * change.difference
    if change.standard_error == 0:
        unseen = 1 - plan.alpha ** (1 / change.num_clusters)
        lower, upper = difference - unseen, difference + unseen
    verdict = Verdict.ACCEPT if lower > -plan.margin else Verdict.REJECT if upper < -plan.margin else Verdict.INCONCLUSIVE
    if change.num_clusters < MIN_CLUSTERS:
        verdict = Verdict.INCONCLUSIVE
    total = plan.z_alpha + normal_quantile(plan.power)
    missing = 0
    if verdict is Verdict.INCONCLUSIVE:
        missing = max(1, _clusters_needed(change, plan, difference) - change.num_clusters)
    return Decision(
        verdict=verdict,
        difference=change.difference,
        interval=change.interval,
        lower=sign * (lower if sign > 0 else upper),
        upper=sign * (upper if sign > 0 else lower),
        mde=total * change.standard_error,
        samples_needed=missing,
    )


def perplexity_ratio(change: Change) -> tuple[float, Interval]:
    """Return candidate over baseline perplexity from a change of log-perplexity in nats per token."""
    bounds = change.interval
    return math.exp(change.difference), Interval(lower=math.exp(bounds.lower), upper=math.exp(bounds.upper), level=bounds.level)


def standard_error(baseline: ClusterSums, candidate: ClusterSums) -> float:
    """Return the cluster-robust standard error of the difference of two paired ratios.

    With residuals e_c = (num_c - score den_c) / sum(den) of each engine: sqrt(C / (C - 1) sum (e1_c - e0_c)^2).

    Source: Cochran, Sampling Techniques, 3rd ed., section 6.3 (the linearised variance of a ratio).
    """
    num = baseline.numerators_C.size
    apart = _residuals(candidate) - _residuals(baseline)
    return math.sqrt(num / (num - 1) * float(apart @ apart))


def _residuals(sums: ClusterSums) -> NDArray[np.float64]:
    residuals_C = sums.numerators_C - sums.score * sums.denominators_C
    return np.asarray(residuals_C / sums.denominators_C.sum(), dtype=np.float64)


def _difference(
    top_0: NDArray[np.float64],
    bottom_0: NDArray[np.float64],
    top_1: NDArray[np.float64],
    bottom_1: NDArray[np.float64],
    axis: int = -1,
) -> NDArray[np.float64]:
    """Return candidate minus baseline of [R, C] draws; a draw without any denominator scores 0."""
    scores = [top.sum(axis=axis) / np.maximum(low.sum(axis=axis), 1e-300) for top, low in ((top_0, bottom_0), (top_1, bottom_1))]
    return np.asarray(scores[1] - scores[0], dtype=np.float64)


def _bounds(drawn: "BootstrapResult", level: float) -> tuple[float, float]:
    """Return the interval of the draws; the percentiles where BCa has none, for its jackknife does not vary."""
    lower, upper = drawn.confidence_interval
    if not (math.isfinite(lower) and math.isfinite(upper)):
        lower, upper = np.quantile(drawn.bootstrap_distribution, [(1 - level) / 2, (1 + level) / 2])
    return float(lower), float(upper)


def _clusters_needed(change: Change, plan: Plan, difference: float) -> int:
    """Return C ((z_alpha + z_beta) SE / effect)^2 for the effect seen so far, as `statistics.decide` plans."""
    total = plan.z_alpha + normal_quantile(plan.power)
    if change.standard_error == 0:
        return max(MIN_CLUSTERS, math.ceil(math.log(plan.alpha) / math.log1p(-plan.margin)))
    effect = min(plan.margin, max(abs(plan.margin + difference), plan.margin / 4))
    return max(MIN_CLUSTERS, math.ceil(change.num_clusters * (total * change.standard_error / effect) ** 2))
