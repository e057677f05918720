"""From a git commit that changes a profile to a version that a person signed off, by a process worker and the API."""

import json
import subprocess
from collections.abc import Callable

import pytest
import yaml
from from_commit import MARK, PARAMETERS, PROFILE, SECRET, Story
from mlflow.tracking import MlflowClient
from outside import REPOSITORY, prefect_command, surroundings
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError

from flows.deliver import SIGNATURE, TIMESTAMP, signature
from flows.nightly import newest_signed_off
from model_optimizer.artifacts.base import Stage
from model_optimizer.errors import ConfigError
from model_optimizer.release.verify import verify_bundle


def test_worker_runs_the_code_and_the_profile_of_the_commit(story: Story) -> None:
    assert story.second.states(MARK) == {"Completed"}
    client = MlflowClient(tracking_uri=f"sqlite:///{story.home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("model-optimizer/tiny")
    assert experiment is not None
    (parent,) = client.search_runs([experiment.experiment_id], f"tags.`mo.record_id` = '{story.second.run.id}'")
    assert parent.data.tags["git.sha"] == story.commit
    recorded = [run.data.tags["mo.record_id"] for run in client.search_runs([experiment.experiment_id], max_results=1000)]
    assert len(recorded) == len(set(recorded)) > len(Stage)  # three passes, and nothing is doubled


def test_worker_comes_to_a_verdict_and_a_bundle_that_verifies(story: Story) -> None:
    outcome = story.waiting.outcome
    assert outcome["verdict"] in ("ACCEPT", "REJECT", "INCONCLUSIVE")
    facts = verify_bundle(story.home / "bundles" / "tiny-v1", public_key=next(story.home.parent.rglob("signer/*.pub")))
    assert facts.manifest_sha256 == outcome["manifest_sha256"]
    assert facts.record is not None and facts.record.decision == "signed-off"


def test_worker_is_free_while_the_run_waits_for_a_sign_off(story: Story) -> None:
    state = story.waiting.run.state
    assert state is not None and (state.type, state.name) == ("PAUSED", "Suspended")
    assert (story.waiting.outcome["decision"], story.waiting.num_processes) == ("waiting", 0)
    assert story.waiting.alias_tags["signoff.decision"] == "waiting"


def test_form_signs_the_version_off(story: Story, record_property: Callable[[str, object], None]) -> None:
    for phase, seconds in story.phases.items():
        record_property(phase, round(seconds, 3))
    state = story.approved.run.state
    assert state is not None and state.is_completed(), state and state.message
    outcome = json.loads((story.home / "runs" / f"{story.approved.run.id}.json").read_text(encoding="utf-8"))
    assert (outcome["decision"], outcome["manifest_sha256"]) == ("signed-off", story.waiting.outcome["manifest_sha256"])
    client = MlflowClient(tracking_uri=f"sqlite:///{story.home / 'mlflow.db'}")
    version = client.get_model_version_by_alias("tiny", "signed-off")
    assert version.source == (story.home / "bundles" / "tiny-v1").as_uri()
    assert (version.tags["signoff.decision"], version.tags["signoff.reviewer"]) == ("signed-off", "bob")


def test_run_that_was_resumed_makes_nothing_again(story: Story) -> None:
    assert story.approved.made_at == story.second.made_at
    for stage in Stage:
        assert story.approved.states(stage) == {"Cached"}, stage


def test_team_is_told_of_failure_waiting_and_the_end(story: Story) -> None:
    assert [call.document()["event"] for call in story.calls] == ["failed", "waiting", "accepted"]
    for call in story.calls:
        assert call.headers[SIGNATURE] == f"sha256={signature(SECRET, call.headers[TIMESTAMP], call.body)}"
    failed, waiting, accepted = (call.document() for call in story.calls)
    assert failed["run"] == waiting["run"] == accepted["run"] == str(story.first.run.id)
    assert failed["verdict"] is None and "compile" in failed["because"]
    assert waiting["report_link"].endswith("tiny-v1/metrics/report.html")
    assert [mail["Subject"] for mail in story.box.mails] == [
        "[model-optimizer] tiny failed",
        "[model-optimizer] tiny waits for a sign-off",
        "[model-optimizer] tiny accepted",
    ]


def test_nightly_soak_takes_the_bundle_that_was_signed_off(story: Story) -> None:
    bundles = story.home / "bundles"
    assert newest_signed_off(bundles) == newest_signed_off(bundles, "tiny") == bundles / "tiny-v1"
    with pytest.raises(ConfigError, match=r"no bundle of 'other' in .* is signed off \(signed off: tiny-v1\)"):
        newest_signed_off(bundles, "other")


def test_form_offers_stages_and_notifications_and_refuses_what_it_does_not_know(story: Story) -> None:
    with get_client(sync_client=True) as client:
        manual = client.read_deployment_by_name("model-optimizer/manual")
        schema = manual.parameter_openapi_schema
        assert schema is not None
        assert list(schema["properties"]) == ["profile", "overrides", "refresh", "until", "notify"]
        assert schema["properties"]["refresh"]["items"] == {"$ref": "#/definitions/Stage"}
        assert schema["definitions"]["Stage"]["enum"] == [stage.value for stage in Stage]
        assert set(schema["definitions"]["Notify"]["properties"]) == {"email", "webhook", "on", "bundles_url"}
        for parameters in ({"refresh": ["cook"]}, {"notify": {"email": "x"}}):
            with pytest.raises(PrefectHTTPStatusError, match=r"409|422"):
                client.create_flow_run_from_deployment(manual.id, parameters={"profile": PROFILE, **parameters})
    assert PARAMETERS["refresh"] == ["scan"] and story.second.states("scan") == {"Cached"}


def test_deployments_run_one_at_a_time_and_the_soak_by_night(story: Story) -> None:
    with get_client(sync_client=True) as client:
        found = {
            name: client.read_deployment_by_name(name)
            for name in ("model-optimizer/manual", "model-optimizer/on-commit", "nightly-soak/nightly-soak")
        }
    assert {it.global_concurrency_limit.limit for it in found.values() if it.global_concurrency_limit} == {1}
    assert len([it for it in found.values() if it.global_concurrency_limit]) == 3
    (schedule,) = found["nightly-soak/nightly-soak"].schedules
    assert (schedule.active, schedule.schedule.model_dump()["cron"]) == (True, "0 21 * * *")
    assert found["model-optimizer/on-commit"].version == story.commit


def test_crash_automation_is_taken_by_the_server_and_waits_three_heartbeats(prefect_server: None) -> None:
    path = REPOSITORY / "deploy" / "automations" / "crash-zombies.yaml"
    create = prefect_command("automation", "create", "--from-file", str(path))
    done = subprocess.run(create, env=surroundings(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with get_client(sync_client=True) as client:
        found = client._client.post("/automations/filter", json={}).json()
    (automation,) = [it for it in found if it["name"] == "crash-zombies"]
    trigger, heartbeat_s = automation["trigger"], 180
    assert (trigger["posture"], trigger["after"]) == ("Proactive", ["prefect.flow-run.heartbeat"])
    assert trigger["within"] >= 3 * heartbeat_s and "prefect.flow-run.Suspended" in trigger["expect"]
    assert automation["actions"][0]["state"] == "CRASHED"
    assert yaml.safe_load(path.read_text())["trigger"]["within"] == trigger["within"]
