"""A Measure is honest by construction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Origin, Verdict


def test_measure_refuses_a_missing_value_that_claims_to_be_measured() -> None:
    with pytest.raises(ValidationError, match="origin is not_measured"):
        Measure(name="p95", dimension=Dimension.SPEED, unit="ms", value=None)


def test_measure_refuses_an_unexplained_gap() -> None:
    with pytest.raises(ValidationError, match="why it was not measured"):
        Measure(name="energy", dimension=Dimension.RESOURCE, unit="j", value=None, origin=Origin.NOT_MEASURED)


def test_measure_refuses_to_accept_what_was_not_measured() -> None:
    with pytest.raises(ValidationError, match="cannot be accepted"):
        Measure(
            name="energy",
            dimension=Dimension.RESOURCE,
            unit="j",
            value=None,
            origin=Origin.NOT_MEASURED,
            reason="no counter",
            verdict=Verdict.ACCEPT,
        )


def test_interval_refuses_reversed_ends() -> None:
    with pytest.raises(ValidationError, match="empty"):
        Interval(lower=2.0, upper=1.0)


@pytest.mark.parametrize(
    ("name", "unit", "expected"),
    [("p95_latency", "ms", "speed/p95_latency_ms"), ("speed_ratio", "ratio", "speed/speed_ratio")],
)
def test_metric_names_dimension_and_unit_once(name: str, unit: str, expected: str) -> None:
    assert Measure(name=name, dimension=Dimension.SPEED, unit=unit, value=1.0).metric == expected


@given(st.floats(allow_nan=False, allow_infinity=False), st.none() | st.integers(0, 10**9))
def test_measure_survives_json(value: float, num_samples: int | None) -> None:
    measure = Measure(name="kl", dimension=Dimension.ACCURACY, unit="nats", value=value, num_samples=num_samples)
    assert Measure.model_validate_json(measure.model_dump_json()) == measure
