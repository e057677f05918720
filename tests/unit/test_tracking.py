"""Metrics carry dimension and unit; measured values alone become metrics."""

from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from tasks.record import metrics_of


def test_metrics_of_leaves_out_what_was_not_measured() -> None:
    known = Measure(name="p95_latency", dimension=Dimension.SPEED, unit="ms", value=12.5)
    missing = Measure(
        name="energy", dimension=Dimension.RESOURCE, unit="j", value=None, origin=Origin.NOT_MEASURED, reason="no counter"
    )
    assert metrics_of((known, missing)) == {"speed/p95_latency_ms": 12.5}
