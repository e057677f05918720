"""Metrics carry dimension and unit; measured values alone become metrics."""

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from tasks.record import RunIdentity, end_run_early, metrics_of, open_run
from tasks.tracking import Tracker


def test_metrics_of_leaves_out_what_was_not_measured() -> None:
    known = Measure(name="p95_latency", dimension=Dimension.SPEED, unit="ms", value=12.5)
    missing = Measure(
        name="energy", dimension=Dimension.RESOURCE, unit="j", value=None, origin=Origin.NOT_MEASURED, reason="no counter"
    )
    assert metrics_of((known, missing)) == {"speed/p95_latency_ms": 12.5}


@pytest.mark.parametrize(("because", "status"), [(None, "FINISHED"), ("OSError: no space", "FAILED")])
def test_end_run_early_closes_the_parent_run(
    because: str | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := f"sqlite:///{tmp_path / 'mlflow.db'}")
    tracker = Tracker(tmp_path, "model-optimizer/test")
    run = RunIdentity("flow-1", "test", {"mo.profile": "test"})
    open_run(tracker, run)
    end_run_early(tracker, run, because=because)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("model-optimizer/test")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.data.tags.get("mo.failed_because")) == (status, because)
