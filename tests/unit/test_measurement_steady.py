"""Warm-up found, discarded part shown, unsteady runs refused."""

import numpy as np
import pytest
from scipy.signal import lfilter

from model_optimizer.errors import ConfigError, MeasurementUnstable
from model_optimizer.measurement.steady import find_steady_state

NUM = 8000


def latencies(phi: float, seed: int) -> np.ndarray:
    """Return log-normal latencies around 20 ms."""
    noise = np.random.default_rng(seed).standard_normal(NUM)
    noise[1:] *= np.sqrt(1 - phi**2)
    return 20 * np.exp(0.3 * lfilter([1.0], [1.0, -phi], noise))


@pytest.mark.parametrize("phi", [0.0, 0.6])
def test_find_steady_state_keeps_a_steady_run_whole(phi: float) -> None:
    for seed in range(40):
        found = find_steady_state(latencies(phi, seed))
        assert found.steady and found.discarded_ratio <= 0.1


@pytest.mark.parametrize("amplitude", [4.0, 1.0, -0.5])
@pytest.mark.parametrize("length", [200, 1200])
def test_find_steady_state_cuts_a_sudden_warm_up(amplitude: float, length: int) -> None:
    for seed in range(10):
        samples = latencies(0.3, seed)
        samples[:length] *= 1 + amplitude
        found = find_steady_state(samples)
        assert found.steady and length - 31 <= found.num_discarded <= 2 * length + NUM // 20  # a window holds 31 samples
        assert found.kept(samples).size == NUM - found.num_discarded
        assert found.levels_W[0] / found.levels_W[-50:].mean() == pytest.approx(1 + amplitude, rel=0.25)


def test_find_steady_state_cuts_an_exponential_until_it_no_longer_matters() -> None:
    excess = 3 * np.exp(-np.arange(NUM) / 250)
    for seed in range(20):
        found = find_steady_state(latencies(0.3, seed) * (1 + excess))
        assert found.steady and excess[found.num_discarded] < 0.12 and found.num_discarded < 2400


@pytest.mark.parametrize("shape", ["up", "down", "late step", "early step"])
def test_find_steady_state_refuses_a_run_that_never_settles(shape: str) -> None:
    place = np.linspace(0, 1, NUM)
    factors = {"up": 1 + 0.5 * place, "down": 1.5 - 0.5 * place, "late step": 1 + (place > 0.8), "early step": 1 + (place < 0.45)}
    samples = latencies(0.3, 5) * factors[shape]
    found = find_steady_state(samples)
    assert not found.steady and found.reason
    with pytest.raises(MeasurementUnstable, match="no steady state"):
        found.kept(samples)


def test_find_steady_state_overlooks_what_is_certain_but_too_small_to_matter() -> None:
    place = np.linspace(0, 1, NUM)
    samples = 20 * (1 + 0.01 * place + 1e-5 * np.random.default_rng(0).standard_normal(NUM))
    assert find_steady_state(samples).reason == "no warm-up seen"
    samples[:100] *= 3
    found = find_steady_state(samples)
    assert found.steady and 100 - 31 <= found.num_discarded <= 300
    assert find_steady_state(np.full(1000, 5.0)).steady


def test_find_steady_state_lets_single_stalls_pass() -> None:
    samples = latencies(0.3, 6)
    samples[[100, 4000, 7000]] = 10_000.0
    assert find_steady_state(samples).steady


def test_find_steady_state_refuses_few_samples_and_values_that_are_no_latencies() -> None:
    found = find_steady_state(np.full(100, 5.0))
    assert not found.steady and "160 are the least" in found.reason
    with pytest.raises(ConfigError, match="positive finite"):
        find_steady_state(np.array([1.0, np.inf] * 500))
