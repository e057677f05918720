"""The stability index: known values, and the inputs that break naive ones (case QA-082)."""

import math

import numpy as np
import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.verification.soak_drift import Shift, compare, stability_index

NORMAL = np.random.default_rng(0).normal(size=1000)


@pytest.mark.parametrize(("floor", "expected"), [(1e-4, 0.7124), (1e-6, 1.1736)])
def test_stability_index_of_an_empty_bin_is_finite(floor: float, expected: float) -> None:
    reference, current = [50, 50, 0], [50, 40, 10]
    assert stability_index(reference, current, floor=floor) == pytest.approx(expected, abs=5e-5)
    assert stability_index(current, reference, floor=floor) == stability_index(reference, current, floor=floor)


def test_stability_index_refuses_histograms_that_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="same bins"):
        stability_index([1, 2], [1, 2, 3])
    with pytest.raises(ConfigError, match="with counts"):
        stability_index([0, 0], [1, 2])


def test_compare_of_constants_is_zero_or_a_finite_shift() -> None:
    same, other = compare([5.0] * 200, [5.0] * 200), compare([5.0] * 200, [7.0] * 200)
    assert (same.psi, same.shift) == (0.0, Shift.STABLE)
    assert other.psi is not None and math.isfinite(other.psi) and other.psi > 10 and other.shift is Shift.MOVED


def test_compare_of_few_values_says_insufficient_data() -> None:
    found = compare(NORMAL.tolist(), NORMAL[:8].tolist())
    assert (found.psi, found.shift, found.num_current) == (None, Shift.INSUFFICIENT, 8)


def test_compare_bins_values_outside_the_reference_and_counts_nan_apart() -> None:
    current = np.concatenate([NORMAL + 9, [np.nan] * 3, [np.inf]])
    found = compare(NORMAL.tolist(), current.tolist())
    assert found.shift is Shift.MOVED and (found.num_nan_reference, found.num_nan_current, found.num_current) == (0, 4, 1000)


def test_compare_is_symmetric_and_finds_nothing_in_samples_of_one_law() -> None:
    draws = [np.random.default_rng(seed).normal(size=400).tolist() for seed in range(30)]
    for left, right in zip(draws[::2], draws[1::2], strict=True):
        found, turned = compare(left, right), compare(right, left)
        assert found.psi == pytest.approx(turned.psi) and found.shift is Shift.STABLE
