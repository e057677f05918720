"""Verdicts at any time: error, power, and the capital against its definition."""

import itertools

import numpy as np
import pytest

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.errors import ConfigError
from model_optimizer.verification.statistics_plan import Plan
from model_optimizer.verification.statistics_sequential import STAKES_K, Monitor, confidence_sequence, log_evidence

PLAN = Plan(margin=0.02)
VALUES = np.array([1.0, -1.0, 0.0])


def flips(num: int, discordance: float, difference: float, seed: int) -> np.ndarray:
    shares = [(discordance + difference) / 2, (discordance - difference) / 2, 1 - discordance]
    return np.random.default_rng(seed).choice(VALUES, num, p=shares)


def test_monitor_holds_the_product_of_its_bets() -> None:
    seen = [1.0, -1.0, 0.0, 0.5, -0.25]
    accept = np.mean([np.prod([1 + stake * (x + 0.02) for x in seen]) for stake in STAKES_K])
    reject = np.mean([np.prod([1 - stake * (x + 0.02) for x in seen]) for stake in STAKES_K])
    assert Monitor(PLAN).after(np.array(seen)).evidence == pytest.approx((accept, reject), rel=1e-12)


def test_evidence_is_fair_at_the_margin() -> None:
    """The mean capital over every sequence of five flips, each with its probability, is exactly 1."""
    shares = {1.0: 0.04, -1.0: 0.06, 0.0: 0.9}
    mean = [0.0, 0.0]
    for seen in itertools.product(shares, repeat=5):
        mass = np.prod([shares[x] for x in seen])
        found = Monitor(PLAN).after(np.array(seen)).evidence
        mean = [mean[0] + mass * found[0], mean[1] + mass * found[1]]
    assert mean == pytest.approx([1.0, 1.0], abs=1e-12)


def test_monitor_says_the_same_however_the_items_are_parted() -> None:
    items = flips(3000, 0.1, 0.0, 0)
    whole, parted = Monitor(PLAN).after(items), Monitor(PLAN)
    for part in np.split(items, [1, 700, 701, 2500]):
        parted = parted.after(part)
    assert (parted.verdict, parted.decided_at, parted.num_items) == (whole.verdict, whole.decided_at, 3000)
    assert whole.verdict is Verdict.ACCEPT and whole.decided_at is not None and 500 < whole.decided_at < 3000
    assert parted.difference == pytest.approx(items.mean())
    counts = np.array([(items == value).sum() for value in VALUES])
    assert np.log(parted.evidence[0]) == pytest.approx(float(log_evidence(VALUES, counts, -0.02)))
    assert parted.after(np.array([])).evidence == parted.evidence


def test_monitor_keeps_its_first_verdict() -> None:
    found = Monitor(PLAN).after(np.ones(40))
    assert found.verdict is Verdict.ACCEPT and found.after(-np.ones(500)).verdict is Verdict.ACCEPT
    assert Monitor(PLAN).after(-np.ones(40)).verdict is Verdict.REJECT


def test_monitor_errs_at_most_at_alpha_however_often_it_looks() -> None:
    accepted = rejected = 0
    for seed in range(100):
        found = Monitor(PLAN).after(flips(2000, 0.1, -0.02, seed))
        accepted += found.verdict is Verdict.ACCEPT
        rejected += found.verdict is Verdict.REJECT
    assert accepted <= 5 and rejected <= 5  # the true share is about 1 %


@pytest.mark.parametrize(("difference", "verdict"), [(0.0, Verdict.ACCEPT), (-0.06, Verdict.REJECT)])
def test_monitor_decides_with_about_the_fixed_number_of_items(difference: float, verdict: Verdict) -> None:
    fixed = PLAN.items(0.1)
    found = [Monitor(PLAN).after(flips(4 * fixed, 0.1, difference, seed)) for seed in range(30)]
    assert sum(one.verdict is verdict for one in found) >= 28
    assert np.median([one.decided_at or 4 * fixed for one in found]) < 1.7 * fixed


def test_confidence_sequence_holds_the_mean_and_narrows() -> None:
    items = np.random.default_rng(1).uniform(-0.3, 0.4, 4000)
    widths = []
    for num in (100, 1000, 4000):
        found = confidence_sequence(items[:num])
        assert found.lower < 0.05 < found.upper
        widths.append(found.upper - found.lower)
    assert widths[0] > widths[1] > widths[2]
    fixed = 3.92 * items.std() / np.sqrt(4000)
    assert fixed < widths[2] < 2.2 * fixed


def test_confidence_sequence_bounds_are_where_the_capital_reaches_its_limit() -> None:
    items = flips(2000, 0.1, 0.01, 2)
    found = confidence_sequence(items, level=0.9)
    counts = np.array([(items == value).sum() for value in VALUES])
    assert float(log_evidence(VALUES, counts, found.lower)) == pytest.approx(np.log(20), abs=1e-6)
    assert float(log_evidence(-VALUES, counts, -found.upper)) == pytest.approx(np.log(20), abs=1e-6)
    mirrored = confidence_sequence(-items, level=0.9)
    assert (mirrored.lower, mirrored.upper) == pytest.approx((-found.upper, -found.lower), abs=1e-9)


def test_sequential_refuses_differences_beyond_one() -> None:
    with pytest.raises(ConfigError, match=r"lie in \[-1, 1\]; seen: 1.5"):
        Monitor(PLAN).after(np.array([0.0, 1.5]))
    with pytest.raises(ConfigError, match="nan"):
        confidence_sequence(np.array([np.nan]))
