"""Paired non-inferiority against published figures, an independent solution, and simulation."""

import numpy as np
import pytest
from scipy.stats import norm

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.errors import ConfigError
from model_optimizer.verification.statistics import (
    Flips,
    cluster_bootstrap,
    decide,
    design_effect,
    mcnemar_p_value,
    minimum_detectable_effect,
    samples_needed,
    tango_interval,
    tango_statistic,
)


def closed_form_roots(flips: Flips) -> np.ndarray:
    """Solve T(d)^2 = z^2 as the quartic of Yang, Sun and Hardin, Statistics in Medicine 32, 2013; real roots, rising."""
    n, s, d = flips.num_items, flips.num_gained + flips.num_lost, flips.num_gained - flips.num_lost
    g = norm.ppf(0.975) ** 2
    k = n / g
    polynomial = [
        n**2 * (k + 1) ** 2,
        -n * d * (k + 1) * (4 * k + 1),
        2 * n * d**2 * (3 * k + 2) / g - n**2 * (s / g + 1),
        n * d * (2 * s / g + 1) - d**3 * (4 * k + 1) / g,
        d**2 * (d**2 / g - s) / g,
    ]
    roots = np.roots(polynomial)
    return np.sort(roots[np.abs(roots.imag) < 1e-6].real)


def test_tango_interval_equals_the_published_example() -> None:
    interval = tango_interval(Flips(21, 1, 7))  # airway data; Fagerland, Lydersen, Laake, BMC Med Res Methodol 14, 2014
    assert (round(interval.lower, 3), round(interval.upper, 3)) == (-0.517, -0.026)


@pytest.mark.parametrize("flips", [Flips(160, 40, 20), Flips(600, 3, 9), Flips(44, 0, 1), Flips(600, 0, 0), Flips(54, 14, 0)])
def test_tango_interval_equals_the_closed_form(flips: Flips) -> None:
    interval, roots = tango_interval(flips), closed_form_roots(flips)
    assert np.abs(roots - interval.lower).min() < 1e-8
    assert np.abs(roots - interval.upper).min() < 1e-8
    assert interval.lower < flips.difference < interval.upper or flips.difference == 0


def test_tango_interval_mirrors_when_gains_and_losses_swap() -> None:
    one, other = tango_interval(Flips(300, 4, 11)), tango_interval(Flips(300, 11, 4))
    assert (one.lower, one.upper) == pytest.approx((-other.upper, -other.lower), abs=1e-12)


def draw(num_items: int, discordance: float, difference: float, num_draws: int, seed: int) -> np.ndarray:
    """Return gained and lost counts, [2, draws]."""
    gained, lost = (discordance + difference) / 2, (discordance - difference) / 2
    return np.random.default_rng(seed).multinomial(num_items, [gained, lost, 1 - gained - lost], num_draws).T[:2].astype(float)


@pytest.mark.parametrize(("num_items", "discordance", "margin"), [(700, 0.04, 0.02), (700, 0.10, 0.02), (13739, 0.02, 0.003)])
def test_gate_passes_a_loss_of_the_margin_at_most_at_alpha(num_items: int, discordance: float, margin: float) -> None:
    gained, lost = draw(num_items, discordance, -margin, 20000, seed=0)
    passed = tango_statistic(gained, lost, np.full(gained.shape, float(num_items)), -margin) > norm.ppf(0.95)
    assert 0.03 <= passed.mean() <= 0.055  # standard error 0.0015


def test_gate_accepts_no_loss_with_the_planned_power() -> None:
    num_items = samples_needed(0.04, 0.02, alpha=0.05, power=0.8)
    gained, lost = draw(num_items, 0.04, 0.0, 20000, seed=1)
    passed = tango_statistic(gained, lost, np.full(gained.shape, float(num_items)), -0.02) > norm.ppf(0.95)
    assert passed.mean() == pytest.approx(0.8, abs=0.05)


def test_interval_covers_at_its_level() -> None:
    gained, lost = draw(400, 0.06, -0.01, 20000, seed=2)
    statistic = tango_statistic(gained, lost, np.full(gained.shape, 400.0), -0.01)
    assert (np.abs(statistic) <= norm.ppf(0.975)).mean() == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(
    ("flips", "verdict"),
    [
        (Flips(600, 0, 0), Verdict.ACCEPT),
        (Flips(600, 12, 10), Verdict.ACCEPT),
        (Flips(600, 10, 14), Verdict.INCONCLUSIVE),
        (Flips(40, 0, 0), Verdict.INCONCLUSIVE),
        (Flips(600, 5, 60), Verdict.REJECT),
    ],
)
def test_decide_answers_by_the_side_of_the_margin(flips: Flips, verdict: Verdict) -> None:
    found = decide(flips, 0.02, alpha=0.05, power=0.8)
    assert found.verdict is verdict
    assert (found.samples_needed > 0) == (verdict is Verdict.INCONCLUSIVE)
    assert found.interval.lower < found.lower <= found.upper < found.interval.upper


def test_decide_would_accept_with_the_samples_that_it_asks_for() -> None:
    few = decide(Flips(100, 2, 2), 0.02, alpha=0.05, power=0.8)
    assert few.verdict is Verdict.INCONCLUSIVE
    grown = (100 + few.samples_needed) / 100
    assert decide(Flips(100 * grown, 2 * grown, 2 * grown), 0.02, alpha=0.05, power=0.8).verdict is Verdict.ACCEPT


def test_decide_refuses_no_items() -> None:
    with pytest.raises(ConfigError, match="0 items"):
        decide(Flips(0, 0, 0), 0.02, alpha=0.05, power=0.8)


@pytest.mark.parametrize(("discordance", "needed"), [(0.005, 3435), (0.01, 6870), (0.02, 13739), (0.05, 34348)])
def test_samples_needed_are_the_planned_ones(discordance: float, needed: int) -> None:
    assert abs(samples_needed(discordance, 0.003, alpha=0.05, power=0.8) - needed) <= 1
    effect = minimum_detectable_effect(discordance, needed, alpha=0.05, power=0.8)
    assert effect == pytest.approx(0.003, rel=1e-4)


def test_mcnemar_is_the_exact_binomial() -> None:
    assert mcnemar_p_value(1, 7) == pytest.approx(2 * (1 + 8) / 2**8)
    assert mcnemar_p_value(0, 0) == 1.0


def test_design_effect_is_one_without_clusters_and_the_cluster_size_for_copies() -> None:
    differences = np.array([1.0, -1.0, 0.0, 1.0, 0.0, 0.0, -1.0, 0.0])
    assert design_effect(differences, [str(index) for index in range(8)]) == 1.0
    copies = np.repeat(differences, 3)
    assert design_effect(copies, [str(index // 3) for index in range(24)]) == pytest.approx(3.0)


def test_cluster_bootstrap_has_the_spread_of_the_clusters() -> None:
    generator = np.random.default_rng(0)
    sums, counts = generator.normal(5, 1, 60), np.full(60, 10.0)
    interval = cluster_bootstrap(sums, counts, seed=0)
    half_width = 1.96 * (sums / 10).std() / np.sqrt(60)
    assert (interval.upper - interval.lower) / 2 == pytest.approx(half_width, rel=0.1)


def test_cluster_bootstrap_draws_the_same_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    sums, counts = generator.normal(5, 1, 77), generator.integers(1, 20, 77).astype(np.float64)
    whole = cluster_bootstrap(sums, counts, seed=3)
    monkeypatch.setattr("model_optimizer.verification.statistics.RESAMPLE_CHUNK", 1000)
    assert cluster_bootstrap(sums, counts, seed=3) == whole
