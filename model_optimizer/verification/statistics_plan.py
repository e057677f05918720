"""A declared plan (alpha, power, margin) and the sample sizes that follow from it, before anything is measured."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError
from model_optimizer.verification.statistics import (
    minimum_detectable_effect,
    normal_quantile,
    samples_needed,
    tango_statistic,
)

RESERVE_RATIO = 1.05
"""Planned over computed items: pays for the steps of counts and for a share of flips that is itself a guess."""
MASS_SIGMAS = 6.0
"""Flip counts further from their mean than this have a probability below 1e-8 and are left out of the exact power."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a gate promises, written down before the run; an absolute `margin` of the score, e.g. 0.003 for 0.3 points.

    Raises:
        ConfigError: alpha outside (0, 0.5), power outside (0.5, 1), margin outside (0, 1).
    """

    alpha: float = 0.05
    power: float = 0.8
    margin: float = 0.003

    def __post_init__(self) -> None:
        if not (0 < self.alpha < 0.5 < self.power < 1 and 0 < self.margin < 1):
            raise ConfigError(
                "a plan takes alpha in (0, 0.5), power in (0.5, 1) and a margin in (0, 1); "
                f"seen: alpha {self.alpha:g}, power {self.power:g}, margin {self.margin:g}"
            )

    @property
    def z_alpha(self) -> float:
        """Return the one-sided critical value."""
        return normal_quantile(1 - self.alpha)

    def items(self, discordance: float) -> int:
        """Return the paired items to plan for non-inferiority when a share `discordance` flips and the truth is no change.

        The least number, in steps of 1 %, whose exact power for ACCEPT at no change and for REJECT at twice the margin
        are both as declared, with the reserve on top. Where flips are too rare for a loss of twice the margin to be
        possible, only the first is asked.
        """
        num_items = samples_needed(discordance, self.margin, alpha=self.alpha, power=self.power)
        while min(self._powers(num_items, discordance)) < self.power:
            num_items = math.ceil(num_items * 1.01)
        return math.ceil(num_items * RESERVE_RATIO)

    def items_equivalence(self, discordance: float) -> int:
        """Return n = d (z_alpha + z_(1 + power)/2)^2 / margin^2, the items for two one-sided tests at no change, with reserve.

        Source: Schuirmann's two one-sided tests; Chow, Shao, Wang, Sample Size Calculations in Clinical Research, 3.2.
        """
        total = self.z_alpha + normal_quantile((1 + self.power) / 2)
        return math.ceil(RESERVE_RATIO * math.ceil(discordance * total**2 / self.margin**2))

    def items_unpaired(self, score_ratio: float) -> int:
        """Return n = 2 p (1 - p) (z_alpha + z_beta)^2 / margin^2 per arm, what a test without pairing (Welch) would take."""
        total = self.z_alpha + normal_quantile(self.power)
        return math.ceil(2 * score_ratio * (1 - score_ratio) * total**2 / self.margin**2)

    def detectable(self, discordance: float, num_items: float) -> float:
        """Return the minimum detectable effect of `num_items` pairs, an absolute score difference."""
        return minimum_detectable_effect(discordance, num_items, alpha=self.alpha, power=self.power)

    def _powers(self, num_items: int, discordance: float) -> list[float]:
        powers = [exact_shares(num_items, discordance, 0.0, self)[0]]
        if discordance > 2 * self.margin:
            powers.append(exact_shares(num_items, discordance, -2 * self.margin, self)[1])
        return powers


def exact_shares(num_items: int, discordance: float, difference: float, plan: Plan) -> tuple[float, float]:
    """Return the probabilities of ACCEPT and of REJECT, summed over all counts of gained and lost items.

    `discordance` = p_gained + p_lost and `difference` = p_gained - p_lost are the truth.

    Raises:
        ConfigError: a difference that so few flips cannot make.
    """
    from scipy.stats import binom

    if abs(difference) > discordance:
        raise ConfigError(f"a difference of {difference:g} needs at least as many flips; seen: {discordance:g}")
    mean, spread = num_items * discordance, math.sqrt(num_items * discordance * (1 - discordance))
    reach = MASS_SIGMAS * spread + MASS_SIGMAS
    flips_S = np.arange(max(0, math.floor(mean - reach)), min(num_items, math.ceil(mean + reach)) + 1)
    weight_S = binom.pmf(flips_S, num_items, discordance)
    gained_share = (discordance + difference) / (2 * discordance) if discordance else 0.5
    accept_S = _critical(flips_S, num_items, plan, plan.z_alpha)
    reject_S = _critical(flips_S, num_items, plan, -plan.z_alpha)
    accept = weight_S @ binom.sf(accept_S, flips_S, gained_share)
    reject = weight_S @ binom.cdf(reject_S, flips_S, gained_share)
    return float(accept), float(reject)


def _critical(flips_S: NDArray[np.int64], num_items: int, plan: Plan, z: float) -> NDArray[np.int64]:
    """Return per number of flips the most gained items whose score statistic at -margin is not above z, -1 for none.

    The statistic rises with the gained items of a fixed number of flips, so halving the range finds it. For z < 0
    "not above" and "below" differ on a null set of counts only.
    """
    low, high = np.full(flips_S.shape, -1), flips_S.copy()
    total = np.full(flips_S.shape, float(num_items))
    while (low < high).any():
        middle = -((-low - high) // 2)  # rounded up
        value = tango_statistic(middle.astype(np.float64), (flips_S - middle).astype(np.float64), total, -plan.margin)
        above = value > z
        high = np.where(above, middle - 1, high)
        low = np.where(above, low, middle)
    return low
