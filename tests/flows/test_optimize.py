"""The whole flow on a tiny model: complete, tracked, and never done twice."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import mlflow
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactCollectionFilter, ArtifactCollectionFilterKey
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL
from prefect.states import Pending

from flows.bootstrap import home, run_file
from flows.cli.approve import Answer, Means, answer_bundle
from flows.cli.run import require_answer
from flows.optimize import optimize
from model_optimizer.artifacts.base import Stage
from model_optimizer.errors import AwaitingSignOff
from model_optimizer.release.approvers import public_line
from model_optimizer.release.sign import SigningKey, ensure_key
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
    models = client.search_logged_models([parent.info.experiment_id], f"tags.`prefect.flow_run_id` = '{first.flow_run_id}'")
    assert {model.name.replace(" on ", "/") for model in models} == {name.replace(".", "_") for name in candidates}
    (chosen,) = [model for model in models if model.tags["mo.candidate"] == parent.data.tags["mo.strategy"]]
    axes = {metric.key.partition("/")[0] for metric in chosen.metrics or []}
    assert {"accuracy", "speed", "resource", "robustness"} <= axes
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


def test_optimize_makes_only_verify_and_package_again_when_a_golden_item_changes(
    first: Ran, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = project.parent / "words" / "items.jsonl"
    before = items.read_text(encoding="utf-8")
    items.write_text(before.replace('"w-0007"', '"w-7777"'), encoding="utf-8")
    third = run(project)
    assert "changed since the last run of tiny: golden set words; what depends on it is made anew" in capsys.readouterr().err
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


def run_deployed(profile: Path, overrides: list[str], refresh: list[str]) -> FlowRun:
    """Run the flow as a deployment's run, in this process; return how it lies then."""
    with get_client(sync_client=True) as api:
        deployment = api.create_deployment(api.create_flow(optimize), f"in-process-{uuid4()}")
        parameters = {"profile": str(profile), "overrides": ["release.approval=manual", *overrides], "refresh": refresh}
        return _go_on(api, api.create_flow_run_from_deployment(deployment, parameters=parameters, state=Pending()))


def run_answered(found: FlowRun, answer: dict[str, object]) -> FlowRun:
    """Answer the form of a suspended run, and let it go on as a worker would."""
    with get_client(sync_client=True) as api:
        answered = api.resume_flow_run(found.id, run_input=answer)
        assert answered.status is SetStateStatus.ACCEPT, answered.details
        return run_scheduled(found)


def run_scheduled(found: FlowRun) -> FlowRun:
    """Run what is to be resumed."""
    with get_client(sync_client=True) as api:
        assert state_of(api.read_flow_run(found.id))[0] == "Resuming"
        api.set_flow_run_state(found.id, Pending())
        return _go_on(api, api.read_flow_run(found.id))


def _go_on(api: SyncPrefectClient, found: FlowRun) -> FlowRun:
    with suppress(Pause):
        run_flow(optimize, found, parameters=optimize.validate_parameters(found.parameters), return_type="state")
    return api.read_flow_run(found.id)


def state_of(found: FlowRun) -> tuple[str, str | None]:
    assert found.state is not None
    return found.state.name or "", found.state.state_details.pause_key


def outcome_of(found: FlowRun) -> dict[str, Any]:
    return dict(json.loads(run_file(str(found.id)).read_text()))


@pytest.fixture(scope="module")
def suspended(first: Ran, project: Path) -> FlowRun:
    """A run under a policy that waits; only packaging is made anew."""
    return run_deployed(project, ["release.ways=[form]", "release.wait_days=1"], ["package"])


def test_optimize_suspends_with_a_form_until_somebody_signs_off(suspended: FlowRun, client: MlflowClient) -> None:
    assert state_of(suspended) == ("Suspended", "signoff")
    assert suspended.state is not None and suspended.state.state_details.pause_timeout is not None
    left = (suspended.state.state_details.pause_timeout - suspended.state.timestamp).total_seconds()
    assert 86000 < left <= 86400
    outcome = outcome_of(suspended)
    assert (outcome["decision"], outcome["level"], outcome["signoff"]["method"]) == ("waiting", "none", None)
    made = [stage for stage, cached in outcome["stages"].items() if not cached]
    assert made == ["package"]
    (version,) = client.search_model_versions(f"name = 'tiny' and source_path = '{Path(outcome['bundle']).as_uri()}'")
    assert version.tags["signoff.decision"] == "waiting"


def test_server_rejects_a_form_with_a_bad_decision(suspended: FlowRun) -> None:
    with get_client(sync_client=True) as api:
        for answer in (
            {"reviewer": "ann", "decision": "perhaps"},
            {"decision": "approve"},
            {"reviewer": "", "decision": "approve"},
        ):
            assert api.resume_flow_run(suspended.id, run_input=answer).status is SetStateStatus.REJECT
        assert state_of(api.read_flow_run(suspended.id)) == ("Suspended", "signoff")


def test_optimize_asks_again_what_cannot_be_recorded_and_then_signs_off(
    suspended: FlowRun, project: Path, client: MlflowClient
) -> None:
    before = outcome_of(suspended)
    again = run_answered(suspended, {"reviewer": "ann", "decision": "approve", "report_sha256": "0" * 64})
    assert state_of(again) == ("Suspended", "signoff-2")
    waivers = [f"{gate}=a tiny model on a busy machine" for gate in before["signoff"]["needs_waivers"]]
    done = run_answered(suspended, {"reviewer": "ann", "decision": "approve", "waivers": waivers})
    assert state_of(done) == ("Completed", None)
    outcome = outcome_of(done)
    assert (outcome["decision"], outcome["level"], outcome["signoff"]["reviewer"]) == ("signed-off", "provisional", "ann")
    assert f"flow run {suspended.id}" in outcome["signoff"]["identity"]
    assert list(outcome["signoff"]["waivers"]) == before["signoff"]["needs_waivers"]
    assert outcome["manifest_sha256"] == before["manifest_sha256"] and all(outcome["stages"].values())
    facts = verify_bundle(Path(outcome["bundle"]), public_key=next(project.parent.glob("signer/*.pub")))
    assert facts.record is not None and facts.record.method == "form"
    version = client.get_model_version_by_alias("tiny", "signed-off")
    assert (version.tags["mo.manifest_sha256"], version.tags["signoff.reviewer"]) == (before["manifest_sha256"], "ann")


@pytest.fixture(scope="module")
def alice(project: Path) -> SigningKey:
    return ensure_key(project.parent / "alice.pem")


@pytest.fixture(scope="module")
def waiting(first: Ran, project: Path, alice: SigningKey) -> Ran:
    """A run without a deployment under a policy that waits for Alice's key or the form."""
    policy = (f"release.approvers={{alice: {public_line(alice)}}}", "release.ways=[key, form]")
    state = optimize(str(project), ("release.approval=manual", *policy), [Stage.PACKAGE], return_state=True)
    ran = Ran(str(state.state_details.flow_run_id), {})
    document = json.loads(run_file(ran.flow_run_id).read_text())
    assert state.is_completed() == (document["verdict"] == "ACCEPT"), state.message
    return Ran(ran.flow_run_id, document)


def test_run_without_a_deployment_waits_and_says_what_to_do(waiting: Ran) -> None:
    words = f"model-optimizer approve {Path(waiting.outcome['bundle']).name} --key KEY --report-sha256 "
    assert (waiting.outcome["decision"], waiting.outcome["signoff"]["next"].startswith(words)) == ("waiting", True)
    with pytest.raises(AwaitingSignOff, match=words) as caught:
        require_answer(run_file(waiting.flow_run_id))
    assert caught.value.exit_code == 7


def test_approve_tells_mlflow_and_lets_a_suspended_run_go_on(
    waiting: Ran,
    project: Path,
    alice: SigningKey,
    client: MlflowClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asleep = run_deployed(project, [], [])
    name = Path(waiting.outcome["bundle"]).name
    assert (state_of(asleep), outcome_of(asleep)["bundle"]) == (("Suspended", "signoff"), waiting.outcome["bundle"])
    monkeypatch.setenv("PREFECT_API_URL", str(PREFECT_API_URL.value()))
    means = Means(alice.private, public_key=next(project.parent.glob("signer/*.pub")))
    waivers = tuple(f"{gate}=a tiny model" for gate in waiting.outcome["signoff"]["needs_waivers"])
    answer = Answer(waivers=waivers, report_sha256=waiting.outcome["signoff"]["report_sha256"][:16])
    answer_bundle(waiting.flow_run_id, answer, means, as_json=True)
    assert json.loads(capsys.readouterr().out)["reviewer"] == "alice"
    version = client.get_model_version_by_alias("tiny", "signed-off")
    assert (version.tags["mo.bundle"], version.tags["signoff.reviewer"]) == (name, "alice")
    with get_client(sync_client=True) as api:
        (artifact,) = api.read_latest_artifacts(
            artifact_filter=ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=["signoff"]))
        )
    assert artifact.description == f"{name}: signed-off" and "alice" in str(artifact.data)
    done = run_scheduled(asleep)
    assert (state_of(done)[0], outcome_of(done)["signoff"]["reviewer"]) == ("Completed", "alice")
    assert outcome_of(done)["manifest_sha256"] == waiting.outcome["manifest_sha256"]
