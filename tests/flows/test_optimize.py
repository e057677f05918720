"""The whole flow on a tiny model: complete, tracked, and never done twice."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from flows.bootstrap import home, run_file
from flows.optimize import optimize
from model_optimizer.artifacts.base import Stage
from model_optimizer.release.verify import verify_bundle


@dataclass(frozen=True)
class Ran:
    flow_run_id: str
    outcome: dict[str, Any]


def run(profile: Path) -> Ran:
    state = optimize(str(profile), return_state=True)
    flow_run_id = str(state.state_details.flow_run_id)
    assert run_file(flow_run_id).exists(), state.message
    return Ran(flow_run_id, json.loads(run_file(flow_run_id).read_text()))


@pytest.fixture(scope="module")
def first(project: Path) -> Ran:
    return run(project)


@pytest.fixture(scope="module")
def client(first: Ran) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{home() / 'mlflow.db'}")


def runs(client: MlflowClient, query: str) -> list[Run]:
    experiment = client.get_experiment_by_name("model-optimizer/tiny")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], query))


def children(client: MlflowClient, parent: Run) -> list[Run]:
    return runs(client, f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")


def parent_of(client: MlflowClient, ran: Ran) -> Run:
    (parent,) = runs(client, f"tags.`mo.record_id` = '{ran.flow_run_id}'")
    return parent


def test_optimize_makes_every_stage_once(first: Ran) -> None:
    # quantize and compile of the chosen strategy were made by the scan of this very run
    assert set(first.outcome["stages"]) == {stage.value for stage in Stage}
    assert [stage for stage in ("profile", "scan", "memory", "verify", "package") if first.outcome["stages"][stage]] == []
    assert first.outcome["dimensions"].keys() == {"accuracy", "speed", "resource", "robustness"}


def test_optimize_releases_a_bundle_that_verifies(first: Ran, project: Path) -> None:
    bundle = Path(first.outcome["bundle"])
    facts = verify_bundle(bundle, public_key=next(project.parent.glob("signer/*.pub")))
    assert facts.manifest_sha256 == first.outcome["manifest_sha256"]
    assert (bundle.name, (bundle.parent / "tiny-v0" / "manifest.json").is_file()) == ("tiny-v1", True)


def test_optimize_tracks_parent_seven_children_and_a_grandchild_per_measured_candidate(first: Ran, client: MlflowClient) -> None:
    parent = parent_of(client, first)
    stages = children(client, parent)
    names = sorted(run.info.run_name for run in stages)
    assert names == [f"{index}-{stage}" for index, stage in enumerate(Stage, start=1)]
    scan = next(run for run in stages if run.info.run_name == "2-scan")
    candidates = {run.info.run_name for run in children(client, scan)}
    front = json.loads((home() / "store" / "scan" / scan.data.tags["mo.key.front"] / "artifact.json").read_text())["artifact"]
    measured = sum(1 for candidate in front["candidates"] if candidate["measures"])
    assert len(candidates) == measured >= 3
    assert parent.info.status in ("FINISHED", "FAILED")


def test_optimize_names_units_in_every_metric(first: Ran, client: MlflowClient) -> None:
    units = (
        "_ms",
        "_s",
        "_bytes",
        "_ratio",
        "_nats",
        "_count",
        "_per_s",
        "_tok",
        "_bits",
        "_usd",
        "_gib",
        "_flop",
        "_per_hour",
        "_perplexity",
        "_psi",
    )
    unnamed = [
        metric for run in children(client, parent_of(client, first)) for metric in run.data.metrics if not metric.endswith(units)
    ]
    assert unnamed == []


def test_optimize_registers_the_bundle_with_tags_and_alias(first: Ran, client: MlflowClient) -> None:
    alias = "signed-off" if first.outcome["decision"] == "signed-off" else "candidate"
    version = client.get_model_version_by_alias("tiny", alias)
    assert version.tags["mo.manifest_sha256"] == first.outcome["manifest_sha256"]


def test_optimize_again_recomputes_nothing_and_keeps_the_manifest(first: Ran, project: Path, client: MlflowClient) -> None:
    second = run(project)
    assert all(second.outcome["stages"].values())
    assert second.outcome["manifest_sha256"] == first.outcome["manifest_sha256"]
    stages = children(client, parent_of(client, second))
    assert {run.data.tags["mo.cached"] for run in stages} == {"true"}
    assert len(stages) == len(Stage)


def test_optimize_makes_only_verify_and_package_again_when_a_golden_item_changes(first: Ran, project: Path) -> None:
    items = project.parent / "words" / "items.jsonl"
    before = items.read_text(encoding="utf-8")
    items.write_text(before.replace('"w-0007"', '"w-7777"'), encoding="utf-8")
    third = run(project)
    items.write_text(before, encoding="utf-8")
    made = [stage for stage, cached in third.outcome["stages"].items() if not cached]
    assert made == ["verify", "package"]
    assert Path(third.outcome["bundle"]).name == "tiny-v2"


def test_optimize_finishes_without_a_tracking_server_and_sends_the_records_later(
    first: Ran, project: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    alone = run(project)
    assert mlflow.__version__ and os.environ["MLFLOW_TRACKING_URI"]
    assert len(list((home() / "spool").glob("*.json"))) >= 1 + len(Stage)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    run(project)
    assert list((home() / "spool").glob("*.json")) == []
    assert len(children(client, parent_of(client, alone))) == len(Stage)
