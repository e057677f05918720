"""Quantiles of series: independent, correlated, too short."""

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import norm
from scipy.stats import t as student

from model_optimizer.errors import ConfigError, MeasurementUnstable
from model_optimizer.measurement.paired import welch_on_logs
from model_optimizer.measurement.percentiles import (
    Series,
    autocorrelations,
    block_bootstrap,
    block_length,
    jitter,
    quantile,
    quantile_ratio,
    series_quantile,
)


def autoregression(phi: float, num: int, seed: int) -> np.ndarray:
    """Return a stationary AR(1) of unit variance."""
    noise = np.random.default_rng(seed).standard_normal(num)
    noise[1:] *= np.sqrt(1 - phi**2)
    return lfilter([1.0], [1.0, -phi], noise)


def test_series_quantile_is_the_order_statistic_when_independent() -> None:
    samples = np.random.default_rng(0).lognormal(0, 0.4, 3000)
    found, plain = series_quantile(samples, 0.95), quantile(samples, 0.95)
    assert (found.value, found.lower, found.upper) == (plain.value, plain.lower, plain.upper)
    assert found.effective_samples == 3000


def test_autocorrelations_equal_the_direct_sums() -> None:
    values = autoregression(0.7, 50, 3)
    centred = values - values.mean()
    direct = [float(centred[lag:] @ centred[: 50 - lag]) / float(centred @ centred) for lag in range(50)]
    np.testing.assert_allclose(autocorrelations(values), direct, atol=1e-12)
    assert autocorrelations(np.full(5, 2.0)).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("phi", [0.3, 0.6, 0.9])
def test_series_finds_the_correlation_time_of_an_autoregression(phi: float) -> None:
    series = Series.of(autoregression(phi, 100_000, 1))
    truth = (1 + phi) / (1 - phi)  # 1 + 2 sum phi^k; ranks are a little less correlated than the values
    assert 0.85 * truth <= series.correlation_time <= 1.1 * truth
    assert not series.independent
    assert series.effective_samples == pytest.approx(100_000 / series.correlation_time)


def test_series_calls_independent_samples_correlated_at_the_level_of_its_test() -> None:
    generator = np.random.default_rng(7)
    alarms = sum(not Series.of(generator.exponential(1.0, 400)).independent for _ in range(400))
    assert alarms == pytest.approx(20, abs=14)


def test_series_takes_equal_values_for_no_correlation() -> None:
    blocks = np.random.default_rng(0).integers(1, 4, 2000).astype(np.float64)  # ties in any order of ranks
    assert Series.of(blocks).independent and Series.of(np.full(100, 5.0)).independent


def test_quantile_covers_when_correlated_where_order_statistics_do_not() -> None:
    ratios = (0.5, 0.95)
    hits, naive = np.zeros(2), np.zeros(2)
    for seed in range(80):
        series = Series.of(autoregression(0.8, 8000, 1000 + seed))
        for place, ratio in enumerate(ratios):
            truth = float(norm.ppf(ratio))
            for count, found in ((hits, series.quantile(ratio)), (naive, quantile(series.ordered, ratio))):
                assert found.lower is not None and found.upper is not None
                count[place] += found.lower <= truth <= found.upper
    assert (hits / 80 >= 0.88).all()  # 0.95 less 3 standard errors; the benchmark statistics_intervals measures it closely
    assert (naive / 80 <= 0.8).all()


def test_quantile_is_refused_when_too_few_effective_samples_lie_beyond_it() -> None:
    series = Series.of(autoregression(0.9, 20_000, 0))
    assert series.quantile(0.99).interval() is not None
    refused = series.quantile(0.999)
    assert refused.interval() is None and "10000 would" in refused.reason
    with pytest.raises(MeasurementUnstable, match=r"effective samples do not bound the 99.9 % quantile"):
        refused.bounded()


def test_quantile_is_refused_when_the_series_is_shorter_than_eight_long_batches() -> None:
    found = series_quantile(autoregression(0.95, 600, 0), 0.5)
    assert found.interval() is None and "correlated over" in found.reason


def test_bounded_names_the_samples_that_are_needed() -> None:
    with pytest.raises(MeasurementUnstable, match="40 samples do not bound the 99 % quantile; 368 would"):
        quantile(np.arange(40.0), 0.99).bounded()
    assert quantile(np.arange(400.0), 0.99).bounded().num_samples == 400


def test_quantile_above_failures_is_infinite_and_unbounded() -> None:
    samples = np.random.default_rng(0).exponential(1.0, 1000)
    samples[::50] = np.inf  # 2 % failed
    assert np.isfinite(quantile(samples, 0.95).value)
    assert quantile(samples, 0.99).value == np.inf and quantile(samples, 0.99).interval() is None


def test_block_bootstrap_has_the_standard_error_of_an_autoregression() -> None:
    phi, num = 0.8, 4000
    series = Series.of(autoregression(phi, num, 11))
    found = block_bootstrap(series, lambda drawn: drawn.mean(axis=1), seed=0)
    error = np.sqrt((1 + phi) / (1 - phi) / num)  # of the mean; independent resampling would give a third of it
    assert (found.upper - found.lower) / 3.92 == pytest.approx(error, rel=0.25)


def test_block_bootstrap_of_independent_samples_draws_single_ones() -> None:
    samples = np.random.default_rng(2).normal(5, 1, 2000)
    series = Series.of(samples)
    assert block_length(series) == 1
    found = block_bootstrap(series, lambda drawn: drawn.mean(axis=1), seed=0)
    assert (found.upper - found.lower) / 3.92 == pytest.approx(samples.std() / np.sqrt(2000), rel=0.1)
    assert found == block_bootstrap(series, lambda drawn: drawn.mean(axis=1), seed=0)


def test_jitter_is_p99_minus_p50_inside_its_interval() -> None:
    series = Series.of(np.exp(0.3 * autoregression(0.5, 5000, 4)))
    found, truth = jitter(series, seed=0), np.exp(0.3 * norm.ppf(0.99)) - 1
    assert found.value == pytest.approx(np.quantile(series.samples, 0.99) - np.median(series.samples))
    assert found.lower is not None and found.upper is not None
    assert found.lower < truth < found.upper and found.upper - found.lower < 0.3
    assert jitter(Series.of(np.arange(1.0, 50.0)), seed=0).interval() is None


def test_series_refuses_no_samples() -> None:
    with pytest.raises(ConfigError, match="at least one sample"):
        Series.of(np.array([]))


def test_quantile_ratio_covers_the_true_ratio() -> None:
    generator, hits = np.random.default_rng(5), 0
    for _ in range(300):
        slow, fast = generator.lognormal(np.log(1.3), 0.4, 800), generator.lognormal(0.0, 0.3, 600)
        found = quantile_ratio(quantile(slow, 0.9), quantile(fast, 0.9))
        assert found is not None
        hits += found.lower <= 1.3 * np.exp(0.1 * norm.ppf(0.9)) <= found.upper
    assert 276 <= hits <= 298  # 285 expected


def test_quantile_ratio_is_absent_without_bounds_and_refuses_what_has_no_logarithm() -> None:
    wide, short = quantile(np.arange(1.0, 500.0), 0.5), quantile(np.arange(1.0, 40.0), 0.99)
    assert quantile_ratio(wide, short) is None
    same = quantile_ratio(wide, wide)
    assert same is not None and same.lower * same.upper == pytest.approx(1.0, abs=0.02) and same.lower < 1 < same.upper
    with pytest.raises(ConfigError, match="positive bounds"):
        quantile_ratio(wide, quantile(np.arange(-10.0, 490.0), 0.02))


def test_welch_on_logs_is_the_hand_computed_test() -> None:
    baseline, candidate = np.exp([1.0, 2.0, 3.0, 4.0]), np.exp([2.0, 2.5, 3.0])
    ratio, interval, p_value = welch_on_logs(list(baseline), list(candidate))
    spread = [np.array([1.0, 2, 3, 4]).var(ddof=1) / 4, np.array([2.0, 2.5, 3]).var(ddof=1) / 3]
    freedom = sum(spread) ** 2 / (spread[0] ** 2 / 3 + spread[1] ** 2 / 2)
    error = np.sqrt(sum(spread))
    assert ratio == pytest.approx(1.0)
    assert p_value == pytest.approx(1.0)
    assert np.log([interval.lower, interval.upper]) == pytest.approx(student.ppf([0.025, 0.975], freedom) * error)
    with pytest.raises(ConfigError, match="two or more positive"):
        welch_on_logs([1.0], [1.0, 2.0])
