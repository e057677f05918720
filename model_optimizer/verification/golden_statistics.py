"""Paired comparison of one metric on the same items: by flips where an item is right or wrong, else by drawing clusters anew.

Shape letters: N items, K clusters, B resamples.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Interval, Verdict
from model_optimizer.metrics.registry import Statistic
from model_optimizer.verification.statistics import (
    NUM_RESAMPLES,
    Decision,
    Flips,
    decide,
    design_effect,
    mcnemar_p_value,
    normal_quantile,
)
from model_optimizer.verification.statistics_clusters import (
    MIN_CLUSTERS,
    ClusterSums,
    compare_clusters,
    judge_change,
    sum_by_cluster,
)
from model_optimizer.verification.statistics_equivalence import score_p_value
from model_optimizer.verification.statistics_plan import Plan

BLOCK_VALUES = 1 << 23
"""Weights drawn at once: 64 MiB."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What the gate tests: loss below `margin` (absolute score difference), one-sided at `alpha`, planned at `power`."""

    margin: float
    alpha: float
    power: float


@dataclass(frozen=True, slots=True)
class Judged:
    """One comparison under a rule; `decision.difference` is positive where the candidate is better."""

    decision: Decision
    baseline: float
    candidate: float
    num_gained: int
    num_lost: int
    p_worse: float
    """One-sided p-value of a loss no larger than the margin: small where the loss is certain."""
    note: str


class Comparison(Protocol):
    """Baseline and candidate on the same items."""

    @property
    def num_items(self) -> int: ...
    @property
    def baseline_score(self) -> float: ...
    def judge(self, rule: Rule) -> Judged: ...


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Paired outcomes of N items that are right or wrong."""

    baseline_N: NDArray[np.bool_]
    candidate_N: NDArray[np.bool_]
    clusters: tuple[str, ...]

    @property
    def num_items(self) -> int:
        return int(self.baseline_N.size)

    @property
    def baseline_score(self) -> float:
        return float(self.baseline_N.mean())

    @property
    def difference_N(self) -> NDArray[np.float64]:
        """Return +1 gained, -1 lost, 0 unchanged."""
        return self.candidate_N.astype(np.float64) - self.baseline_N.astype(np.float64)

    def judge(self, rule: Rule) -> Judged:
        """Judge flips by the score interval of paired proportions, the sample shrunk by its clustering."""
        difference_N = self.difference_N
        gained, lost = int((difference_N > 0).sum()), int((difference_N < 0).sum())
        inflation = design_effect(difference_N, self.clusters)
        flips = Flips(self.num_items / inflation, gained / inflation, lost / inflation)
        decision = decide(flips, rule.margin, alpha=rule.alpha, power=rule.power)
        clustered = f"; clustering shrinks the sample by {inflation:.2f}" if inflation > 1 else ""
        return Judged(
            decision=replace(decision, samples_needed=round(decision.samples_needed * inflation)),
            baseline=float(self.baseline_N.mean()),
            candidate=float(self.candidate_N.mean()),
            num_gained=gained,
            num_lost=lost,
            p_worse=score_p_value(flips, -rule.margin, worse=True),
            note=f"McNemar p {mcnemar_p_value(gained, lost):.2g} (description only){clustered}",
        )


@dataclass(frozen=True, slots=True)
class Curves:
    """Paired scores of N items by any metric that is a function of the items' weights."""

    baseline: Statistic
    candidate: Statistic
    clusters: tuple[str, ...]
    higher_is_better: bool
    resampled: bool
    """False: the score belongs to these very items and has no sampling error."""
    seed: int = 0

    @property
    def num_items(self) -> int:
        return len(self.clusters)

    @property
    def baseline_score(self) -> float:
        return self.baseline.value

    def judge(self, rule: Rule) -> Judged:
        """Judge the difference by a paired bootstrap over whole clusters: of sums where the score is a ratio, else of the score.

        The bounds are never tighter than the score interval of as many clusters without one flip, z^2 / (n + z^2): a handful
        of items that all stay the same proves little.

        Source: Miller, Adding Error Bars to Evals, arXiv 2411.00640 (clusters, pairs); Efron and Tibshirani 1993 (percentiles).
        """
        sign = 1.0 if self.higher_is_better else -1.0
        baseline, candidate = self.baseline.value, self.candidate.value
        difference = sign * (candidate - baseline)
        own_N = sign * (self.candidate.per_item_N - self.baseline.per_item_N)
        note = f"bounds by {NUM_RESAMPLES} paired resamples of {len(set(self.clusters))} clusters"
        if not self.resampled:
            decision = _exact(difference, rule)
            note = "a property of these very items, without sampling error"
        else:
            decision = self._by_sums(rule) or self._resampled(difference, sign, rule)
        error = max((decision.upper - difference) / normal_quantile(1 - rule.alpha), 1e-12)
        return Judged(
            decision=decision,
            baseline=baseline,
            candidate=candidate,
            num_gained=int((own_N > 0).sum()),
            num_lost=int((own_N < 0).sum()),
            p_worse=_normal_cdf((difference + rule.margin) / error),
            note=note,
        )

    def _by_sums(self, rule: Rule) -> Decision | None:
        """Return the decision about a ratio of sums; None where the score is none, or there is too little to resample."""
        worse, better = (self.baseline, self.candidate) if self.higher_is_better else (self.candidate, self.baseline)
        if worse.sums is None or better.sums is None or len(set(self.clusters)) < MIN_CLUSTERS:
            return None
        if not (worse.sums[1].sum() > 0 and better.sums[1].sum() > 0):
            return None
        sums = [ClusterSums(*(sum_by_cluster(part_N, self.clusters) for part_N in it.sums or ())) for it in (worse, better)]
        plan = Plan(rule.alpha, rule.power, rule.margin)
        decision = judge_change(compare_clusters(sums[0], sums[1], plan, seed=self.seed), plan)
        per_cluster = self.num_items / len(set(self.clusters))
        return replace(decision, samples_needed=math.ceil(decision.samples_needed * per_cluster))

    def _resampled(self, difference: float, sign: float, rule: Rule) -> Decision:
        differences_B = sign * np.concatenate(
            [
                self.candidate.weighted(weights_BN) - self.baseline.weighted(weights_BN)
                for weights_BN in cluster_weights(self.clusters, self.seed)
            ]
        )
        num_clusters = len(set(self.clusters))
        z = normal_quantile(1 - rule.alpha)

        def bounds(level: float) -> tuple[float, float]:
            quantile = normal_quantile(level)
            least = quantile**2 / (num_clusters + quantile**2)
            low, high = np.quantile(differences_B, [1 - level, level])
            return min(float(low), difference - least), max(float(high), difference + least)

        lower, upper = bounds(1 - rule.alpha)
        error = max((upper - lower) / (2 * z), 1e-12)
        verdict = Verdict.ACCEPT if lower > -rule.margin else Verdict.REJECT if upper < -rule.margin else Verdict.INCONCLUSIVE
        mde = (z + normal_quantile(rule.power)) * error
        missing = 0
        if verdict is Verdict.INCONCLUSIVE:
            effect = min(rule.margin, max(abs(rule.margin + difference), rule.margin / 4))
            missing = max(1, math.ceil(self.num_items * ((mde / effect) ** 2 - 1)))
        low, high = bounds(0.975)
        return Decision(
            verdict=verdict,
            difference=difference,
            interval=Interval(lower=low, upper=high),
            lower=lower,
            upper=upper,
            mde=mde,
            samples_needed=missing,
        )


def cluster_weights(clusters: Sequence[str], seed: int, num: int = NUM_RESAMPLES) -> Iterator[NDArray[np.float64]]:
    """Yield blocks of weights [B, N]: how often each item counts when as many clusters are drawn with replacement."""
    names = sorted(set(clusters))
    index = {name: at for at, name in enumerate(names)}
    cluster_N = np.array([index[name] for name in clusters], np.int64)
    generator = np.random.default_rng(seed)
    block = max(1, BLOCK_VALUES // len(clusters))
    for start in range(0, num, block):
        rows = min(block, num - start)
        drawn_BK = generator.integers(0, len(names), (rows, len(names)))
        counts_BK = np.zeros((rows, len(names)))
        np.add.at(counts_BK, (np.arange(rows)[:, None], drawn_BK), 1.0)
        yield counts_BK[:, cluster_N]


def score_interval(statistic: Statistic, clusters: Sequence[str], seed: int = 0, level: float = 0.95) -> Interval:
    """Return the percentile interval of one engine's score."""
    values_B = np.concatenate([statistic.weighted(weights_BN) for weights_BN in cluster_weights(clusters, seed)])
    lower, upper = np.quantile(values_B, [(1 - level) / 2, (1 + level) / 2])
    return Interval(lower=float(lower), upper=float(upper), level=level)


def _exact(difference: float, rule: Rule) -> Decision:
    """Return the decision about a number that is known exactly."""
    return Decision(
        verdict=Verdict.ACCEPT if difference >= -rule.margin else Verdict.REJECT,
        difference=difference,
        interval=Interval(lower=difference, upper=difference),
        lower=difference,
        upper=difference,
        mde=0.0,
        samples_needed=0,
    )


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2)) if math.isfinite(z) else float(z > 0)
