"""Planned sizes, exact power, equivalence, description of flips."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import multinomial, norm

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.errors import ConfigError
from model_optimizer.verification.statistics import Flips, decide, tango_interval
from model_optimizer.verification.statistics_equivalence import count_flips, describe_flips, judge_equivalence, score_p_value
from model_optimizer.verification.statistics_plan import RESERVE_RATIO, Plan, exact_shares

PLAN = Plan(alpha=0.05, power=0.8, margin=0.003)


def test_exact_shares_equal_the_sum_over_all_outcomes_of_the_gate() -> None:
    plan, num, discordance, difference = Plan(margin=0.3), 7, 0.8, -0.3
    gained, lost = (discordance + difference) / 2, (discordance - difference) / 2
    accept = reject = 0.0
    for up, down in itertools.product(range(num + 1), repeat=2):
        if up + down > num:
            continue
        mass = multinomial.pmf([up, down, num - up - down], num, [gained, lost, 1 - discordance])
        verdict = decide(Flips(num, up, down), plan.margin, alpha=plan.alpha, power=plan.power).verdict
        accept += mass * (verdict is Verdict.ACCEPT)
        reject += mass * (verdict is Verdict.REJECT)
    assert exact_shares(num, discordance, difference, plan) == pytest.approx((accept, reject), abs=1e-7)


@pytest.mark.parametrize("discordance", [0.01, 0.02, 0.05])
def test_planned_items_give_the_power_and_keep_alpha(discordance: float) -> None:
    num = PLAN.items(discordance)
    at_zero, at_margin, beyond = (exact_shares(num, discordance, difference, PLAN) for difference in (0.0, -0.003, -0.006))
    assert 0.8 <= at_zero[0] < 0.84 and 0.8 <= beyond[1] < 0.86
    assert at_margin[0] <= 0.05 and at_zero[1] < 1e-4
    normal = discordance * (norm.ppf(0.95) + norm.ppf(0.8)) ** 2 / 0.003**2  # Connor 1987
    assert normal <= num <= 1.1 * normal


def test_planned_items_exist_when_flips_are_too_rare_for_twice_the_margin() -> None:
    assert exact_shares(PLAN.items(0.005), 0.005, 0.0, PLAN)[0] >= 0.8
    with pytest.raises(ConfigError, match="needs at least as many flips"):
        exact_shares(100, 0.005, -0.006, PLAN)


def test_planned_sizes_are_the_tabulated_ones() -> None:
    assert PLAN.items_unpaired(0.7) == pytest.approx(288_519, rel=1e-4)
    assert PLAN.items_unpaired(0.5) == pytest.approx(343_475, rel=1e-4)
    assert PLAN.items_equivalence(0.02) == pytest.approx(19_031 * RESERVE_RATIO, rel=1e-3)
    assert PLAN.detectable(0.02, 13_739) == pytest.approx(0.003, rel=1e-3)
    assert PLAN.items(0.02) < PLAN.items_unpaired(0.7) / 10


@pytest.mark.parametrize("fields", [(0.5, 0.8, 0.003), (0.05, 0.5, 0.003), (0.05, 0.8, 0.0), (0.05, math.nan, 0.1)])
def test_plan_refuses_what_is_no_plan(fields: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="a plan takes alpha"):
        Plan(*fields)


def test_score_p_value_agrees_with_the_interval_at_its_bounds() -> None:
    flips = Flips(160, 40, 20)
    bounds = tango_interval(flips)
    assert score_p_value(flips, bounds.lower) == pytest.approx(0.025, abs=1e-9)
    assert score_p_value(flips, bounds.upper, worse=True) == pytest.approx(0.025, abs=1e-9)


def test_score_p_value_at_zero_is_mcnemar_without_correction() -> None:
    # Agresti, Categorical Data Analysis, section 10.1, approval of a prime minister: 86 and 150 of 1600 moved, z = -4.17
    assert norm.isf(score_p_value(Flips(1600, 86, 150), 0.0)) == pytest.approx(-4.17, abs=0.005)
    assert score_p_value(Flips(1000, 59, 121), 0.0, worse=True) == pytest.approx(norm.sf(62 / math.sqrt(180)))


@pytest.mark.parametrize(
    ("flips", "verdict"),
    [
        (Flips(10_000, 60, 60), Verdict.ACCEPT),
        (Flips(10_000, 20, 120), Verdict.REJECT),
        (Flips(10_000, 120, 20), Verdict.REJECT),
        (Flips(10_000, 120, 90), Verdict.INCONCLUSIVE),
        (Flips(300, 0, 0), Verdict.INCONCLUSIVE),
    ],
)
def test_judge_equivalence_answers_on_both_sides(flips: Flips, verdict: Verdict) -> None:
    found = judge_equivalence(flips, PLAN)
    assert found.verdict is verdict
    assert (found.p_value < 0.05) == (verdict is Verdict.ACCEPT)
    assert (found.samples_needed > 0) == (verdict is Verdict.INCONCLUSIVE)
    swapped = judge_equivalence(Flips(flips.num_items, flips.num_lost, flips.num_gained), PLAN)
    assert (swapped.p_lower, swapped.p_upper) == pytest.approx((found.p_upper, found.p_lower), abs=1e-12)


def test_count_and_describe_flips_give_the_table() -> None:
    baseline = np.array([1, 1, 1, 0, 0, 1, 0, 1], dtype=bool)
    candidate = np.array([1, 0, 0, 1, 0, 0, 0, 1], dtype=bool)
    found = describe_flips(count_flips(baseline, candidate))
    assert (found.flips, found.flip_ratio) == (Flips(8, 1, 3), 0.5)
    assert found.mcnemar_p == pytest.approx(2 * (1 + 4) / 2**4)
    assert found.interval == tango_interval(Flips(8, 1, 3))
    with pytest.raises(ConfigError, match="same items"):
        count_flips(baseline, candidate[:-1])
