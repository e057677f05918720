"""The leak verdict on series whose growth is known: leaks are caught, plateaus and autocorrelated noise are not."""

import numpy as np
import pytest
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.verification.soak_leak import MIN_POINTS, judge, trend

N = 60
HOURS = np.arange(1, N + 1) * 0.4
"""A day in 60 readings."""
BUDGET = 100.0
"""Per hour; 2,400 in the day."""
NOISE = 300.0


def noise(seed: int, phi: float = 0.0, size: int = N) -> NDArray[np.float64]:
    """AR(1) noise of the same variance for every phi."""
    draws = np.random.default_rng(seed).normal(0, NOISE * np.sqrt(1 - phi**2), size)
    series = np.zeros(size)
    series[0] = draws[0] / np.sqrt(1 - phi**2)
    for at in range(1, size):
        series[at] = phi * series[at - 1] + draws[at]
    return series


def verdict(values: NDArray[np.float64]) -> Verdict:
    found = judge(HOURS.tolist(), values.tolist(), BUDGET)
    assert found is not None
    return found[1]


def test_trend_is_theil_and_sen_with_bounds_around_it() -> None:
    from scipy.stats import theilslopes

    values = 50 * HOURS + noise(0)
    found = trend(HOURS.tolist(), values.tolist(), level=0.95)
    slope, _, lower, upper = theilslopes(values, HOURS, alpha=0.95)
    assert found is not None and found.per_hour == pytest.approx(slope)
    assert found.variance_factor == 1.0
    assert found.lower == pytest.approx(lower, rel=0.02) and found.upper == pytest.approx(upper, rel=0.02)


def test_trend_is_widened_by_autocorrelation() -> None:
    narrow = trend(HOURS.tolist(), noise(1).tolist())
    wide = trend(HOURS.tolist(), noise(1, phi=0.9).tolist())
    assert narrow is not None and wide is not None
    assert wide.variance_factor > 2 > narrow.variance_factor


def test_trend_gives_nothing_for_few_readings() -> None:
    few = MIN_POINTS - 1
    assert trend(HOURS[:few].tolist(), HOURS[:few].tolist()) is None
    assert judge(HOURS[:few].tolist(), HOURS[:few].tolist(), 1.0) is None


def test_judge_catches_leaks_of_three_times_the_budget_and_accepts_none() -> None:
    leaks = [verdict(3 * BUDGET * HOURS + noise(seed)) for seed in range(40)]
    clean = [verdict(noise(seed)) for seed in range(40)]
    assert leaks.count(Verdict.REJECT) >= 38
    assert clean.count(Verdict.REJECT) == 0 and clean.count(Verdict.ACCEPT) >= 38


@pytest.mark.parametrize("phi", [0.3, 0.6, 0.9])
def test_judge_raises_no_false_alarm_by_autocorrelated_noise(phi: float) -> None:
    verdicts = [verdict(noise(seed, phi)) for seed in range(60)]
    assert verdicts.count(Verdict.REJECT) == 0


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("plateau", {Verdict.ACCEPT}),
        ("step", {Verdict.ACCEPT, Verdict.INCONCLUSIVE}),
        ("sawtooth", {Verdict.ACCEPT, Verdict.INCONCLUSIVE}),
        ("late leak", {Verdict.REJECT, Verdict.INCONCLUSIVE}),
    ],
)
def test_judge_tells_what_fills_up_from_what_goes_on(shape: str, expected: set[Verdict]) -> None:
    shapes = {
        "plateau": 12_000 * (1 - np.exp(-HOURS / 2)),
        "step": 6_000.0 * (HOURS > 12),
        "sawtooth": 4_000 * (HOURS % 4) / 4,
        "late leak": np.maximum(0, HOURS - 12) * 8 * BUDGET,
    }
    assert {verdict(shapes[shape] + noise(seed) / 10) for seed in range(10)} <= expected


def test_judge_says_inconclusive_where_noise_hides_the_budget() -> None:
    found = judge(HOURS.tolist(), (30 * noise(3)).tolist(), BUDGET)
    assert found is not None and found[1] is Verdict.INCONCLUSIVE


def test_judge_of_a_constant_counter_is_exactly_zero() -> None:
    found = judge(HOURS.tolist(), [7.0] * N, 0.5)
    assert found is not None
    assert (found[0].per_hour, found[0].lower, found[0].upper, found[1]) == (0.0, 0.0, 0.0, Verdict.ACCEPT)


def test_trend_thins_long_series_out_and_keeps_the_slope() -> None:
    hours = np.linspace(0, 72, 4320)
    found = trend(hours.tolist(), (5 * hours).tolist())
    assert found is not None and found.num_points == 1500
    assert found.per_hour == pytest.approx(5.0)
