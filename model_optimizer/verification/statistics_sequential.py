"""Verdicts that may be looked at after every item: canaries, and golden runs that stop as soon as they can.

A bettor starts with capital 1 and bets against the hypothesis "the mean difference is at most m" by multiplying it by
1 + lambda (x - m) at every paired difference x in [-1, 1]. Under the hypothesis the capital is a supermartingale, so
it ever reaches 1 / alpha with a probability of at most alpha (Ville): whoever stops then errs at most that often,
however often he looked. A fixed-size test looked at again and again has no such limit.

The stake is spread evenly over a fixed grid of lambdas, so that the capital of constant shares is averaged: nothing is
tuned on the data, and it depends on the differences as a multiset only. The items must come in random order (a seeded
shuffle), clustered items as one mean difference per cluster.

Source: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, JRSS B 86, 2024, sections 4
and appendix C (mixtures over constant bets); Shafer and Vovk, Game-Theoretic Foundations for Probability and Finance, 2019.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Interval, Verdict
from model_optimizer.errors import ConfigError
from model_optimizer.verification.statistics_plan import Plan

STAKES_K = np.geomspace(0.002, 0.49, 24)
"""Below 1 / 2, so that no capital turns negative for any x and m in [-1, 1]; the best one is about (mean - m) / variance."""
BISECTIONS = 40
STEP_ITEMS = 20_000
"""Items whose capital is held at once: 8 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Monitor:
    """A running paired comparison against the margin; law: m.after(a).after(b) says what m.after(a + b) says."""

    plan: Plan
    num_items: int = 0
    total: float = 0.0
    """Sum of the differences."""
    verdict: Verdict = Verdict.INCONCLUSIVE
    """ACCEPT: the loss is below the margin. REJECT: above. Either stands once reached, whatever follows."""
    decided_at: int | None = None
    """Items seen when the verdict was reached."""
    log_capital_2K: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, STAKES_K.size)))
    """Row 0 bets that the loss is below the margin, row 1 that it is above."""

    @property
    def difference(self) -> float:
        """Return the mean difference so far; 0 before the first item."""
        return self.total / self.num_items if self.num_items else 0.0

    @property
    def evidence(self) -> tuple[float, float]:
        """Return the e-values for ACCEPT and REJECT now; 1 / alpha is what a verdict takes."""
        accept, reject = np.exp(_log_mean(self.log_capital_2K)).tolist()
        return accept, reject

    def after(self, differences_N: NDArray[np.float64]) -> "Monitor":
        """Return the monitor after further paired differences, candidate minus baseline, in the order of arrival.

        Raises:
            ConfigError: a difference outside [-1, 1].
        """
        found = self
        for first in range(0, checked(differences_N).size, STEP_ITEMS):
            found = found._step(differences_N[first : first + STEP_ITEMS])
        return found

    def _step(self, differences_N: NDArray[np.float64]) -> "Monitor":
        excess_N = differences_N + self.plan.margin
        gains_2NK = np.log1p(np.stack([excess_N, -excess_N])[:, :, None] * STAKES_K)
        path_2NK = self.log_capital_2K[:, None, :] + np.cumsum(gains_2NK, axis=1)
        verdict, decided_at = self.verdict, self.decided_at
        if verdict is Verdict.INCONCLUSIVE:
            reached_2N = _log_mean(path_2NK) >= -math.log(self.plan.alpha)
            first = [int(row.argmax()) if row.any() else excess_N.size for row in reached_2N]
            if min(first) < excess_N.size:
                verdict = Verdict.ACCEPT if first[0] < first[1] else Verdict.REJECT
                decided_at = self.num_items + min(first) + 1
        return Monitor(
            plan=self.plan,
            num_items=self.num_items + excess_N.size,
            total=self.total + float(differences_N.sum()),
            verdict=verdict,
            decided_at=decided_at,
            log_capital_2K=path_2NK[:, -1],
        )


def confidence_sequence(differences_N: NDArray[np.float64], *, level: float = 0.95) -> Interval:
    """Return an interval of the mean difference that holds at all looks together with probability `level`.

    All m that neither bettor has refuted at (1 - level) / 2.

    Raises:
        ConfigError: no differences, or one outside [-1, 1].
    """
    if differences_N.size == 0:
        raise ConfigError("a confidence sequence needs at least one difference; seen: none")
    values_V, counts_V = np.unique(checked(differences_N), return_counts=True)
    limit = -math.log((1 - level) / 2)
    lower = _bound(values_V, counts_V, limit)
    return Interval(lower=lower, upper=-_bound(-values_V, counts_V, limit), level=level)


def log_evidence(values_V: NDArray[np.float64], counts_V: NDArray[np.int64], mean: float) -> NDArray[np.float64]:
    """Return the log of the capital that bets against "the mean is at most `mean`" after `counts` of each value.

    counts: [..., V]; one capital for each leading index.
    """
    return _log_mean(np.asarray(counts_V @ np.log1p((values_V - mean)[:, None] * STAKES_K), dtype=np.float64))


def checked(differences_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the differences.

    Raises:
        ConfigError: one outside [-1, 1], or not a number.
    """
    if not (np.abs(differences_N) <= 1).all():
        worst = differences_N[~(np.abs(differences_N) <= 1)][0]
        raise ConfigError(f"paired differences lie in [-1, 1]; seen: {worst:g}; scale the score to [0, 1]")
    return differences_N


def _bound(values_V: NDArray[np.float64], counts_V: NDArray[np.int64], limit: float) -> float:
    """Return the greatest m in [-1, 1] that is refuted from below; the capital falls as m rises."""
    low, high = -1.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if float(log_evidence(values_V, counts_V, middle)) >= limit:
            low = middle
        else:
            high = middle
    return low


def _log_mean(log_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log of the mean of exp over the last axis."""
    top = log_values.max(axis=-1)
    return np.asarray(top + np.log(np.exp(log_values - top[..., None]).mean(axis=-1)), dtype=np.float64)
