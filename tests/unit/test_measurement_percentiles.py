"""Quantiles, paired ratios, interleaving and process memory."""

import numpy as np
import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.interleave import interleave, schedule
from model_optimizer.measurement.paired import bootstrap_mean, ratio_of_pairs
from model_optimizer.measurement.percentiles import quantile, samples_for_upper_bound
from model_optimizer.measurement.process import PeakSampler, quiesced_rss_bytes, rss_bytes


def test_quantile_bounds_are_the_order_statistics_of_the_textbook_table() -> None:
    found = quantile(np.arange(1.0, 26.0), 0.5)  # n = 25: ranks 8 and 18 enclose the median at 95.7 %
    assert (found.value, found.lower, found.upper) == (13.0, 8.0, 18.0)


def test_quantile_has_no_upper_bound_when_the_sample_is_short() -> None:
    found = quantile(np.arange(40.0), 0.95)
    assert found.upper is None and found.lower is not None and found.interval() is None

    assert quantile(np.arange(100.0), 0.95).upper == 99.0


def test_quantile_interval_covers_at_its_level() -> None:
    generator = np.random.default_rng(0)
    truth, hits = np.log(2.0), 0
    for _ in range(1500):
        found = quantile(generator.exponential(1.0, 60), 0.5)
        assert found.lower is not None and found.upper is not None
        hits += found.lower <= truth <= found.upper
    assert 0.945 <= hits / 1500 <= 0.985  # at least 0.95 by construction, a little more for ranks are whole


@pytest.mark.parametrize(("ratio", "needed"), [(0.95, 59), (0.99, 299), (0.999, 2995), (0.9999, 29956)])
def test_samples_for_upper_bound_is_the_known_number(ratio: float, needed: int) -> None:
    assert samples_for_upper_bound(ratio) == needed


def test_quantile_refuses_no_samples() -> None:
    with pytest.raises(ConfigError, match="at least one sample"):
        quantile(np.array([]), 0.5)


def test_ratio_of_pairs_cancels_a_drift_that_both_arms_share() -> None:
    mood = np.linspace(1.0, 3.0, 12)
    found = ratio_of_pairs(list(20 * mood), list(10 * mood), seed=0)
    assert (found.value, found.interval.lower, found.interval.upper, found.num_pairs) == (2.0, 2.0, 2.0, 12)


def test_ratio_of_pairs_covers_the_true_ratio() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        found = ratio_of_pairs(list(np.exp(generator.normal(0.2, 0.1, 15))), [1.0] * 15, seed=trial)
        hits += found.interval.lower <= np.exp(0.2) <= found.interval.upper
    assert hits >= 180


def test_ratio_of_pairs_is_seeded_and_refuses_a_single_pair() -> None:
    top, bottom = [1.0, 2.0, 4.0], [1.0, 1.0, 1.0]
    assert ratio_of_pairs(top, bottom, seed=5) == ratio_of_pairs(top, bottom, seed=5)
    with pytest.raises(ConfigError, match="two or more pairs"):
        ratio_of_pairs([1.0], [1.0], seed=0)
    with pytest.raises(ConfigError, match="positive"):
        ratio_of_pairs([1.0, 0.0], [1.0, 1.0], seed=0)


def test_bootstrap_mean_is_close_to_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(10, 2, 400)
    mean, interval = bootstrap_mean(list(values), seed=0)
    error = values.std() / 20
    assert mean == pytest.approx(values.mean())
    assert interval.lower == pytest.approx(mean - 1.96 * error, abs=0.03)
    assert interval.upper == pytest.approx(mean + 1.96 * error, abs=0.03)


def test_interleave_turns_the_order_round_every_round() -> None:
    assert "".join(arm for _, arm in schedule(("A", "B"), 4)) == "ABBAABBA"
    calls: list[tuple[str, int]] = []
    found = interleave({arm: lambda number, arm=arm: calls.append((arm, number)) or number * 10 for arm in "AB"}, 3)
    assert found == {"A": (0, 10, 20), "B": (0, 10, 20)}
    assert calls == [("A", 0), ("B", 0), ("B", 1), ("A", 1), ("A", 2), ("B", 2)]


def test_peak_sampler_sees_an_allocation_that_is_gone_again() -> None:
    size = 64 * 2**20
    with PeakSampler(interval_s=0.001) as peak:
        block = np.ones(size // 8)
        float(block.sum())
        while peak.peak_bytes < peak.start_bytes + size // 2:
            float(block.sum())
        del block
    assert peak.peak_bytes - peak.start_bytes >= size // 2


def test_quiesced_rss_is_a_plausible_size() -> None:
    assert 2**20 < quiesced_rss_bytes() <= 1.5 * rss_bytes()
