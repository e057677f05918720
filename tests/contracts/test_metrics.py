"""Every registered metric keeps the laws that it states; a new file is tested the moment it exists."""

import math

import pytest

from model_optimizer.metrics.registry import METRICS


@pytest.mark.parametrize("name", METRICS.names())
@pytest.mark.parametrize("seed", range(5))
def test_metric_is_deterministic_and_within_its_bounds(name: str, seed: int) -> None:
    metric = METRICS.get(name)
    value = metric.compute(metric.example(seed))
    assert math.isfinite(value) and isinstance(value, float)
    assert metric.lower_bound <= value <= metric.upper_bound
    assert metric.compute(metric.example(seed)) == value


def test_metrics_are_the_ones_that_the_stages_use() -> None:
    assert {"kl_divergence", "top1_flips", "perplexity", "choice_accuracy"} <= set(METRICS.names())
