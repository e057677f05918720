"""`model-optimizer submit`: one commit and profile is one flow run, which brings its own commit; nothing is waited for."""

import subprocess
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL
from prefect.utilities.templating import apply_values

from flows.cli.submit import ANY_COMMIT, Submission, submit
from flows.prepare import source_commit
from model_optimizer.errors import ConfigError

PROFILE = "name: tiny\nmodel: {ref: m}\ncalibration: {path: c.jsonl}\nverify: {golden_sets: [g]}\n"
URL = "https://example.invalid/models.git"
CLONE = "prefect.deployments.steps.git_clone"


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: None) -> Path:
    """A committed profile in a checkout with a remote, which is the current folder."""
    monkeypatch.setenv("PREFECT_API_URL", str(PREFECT_API_URL.value()))
    monkeypatch.delenv("GITHUB_SHA", raising=False)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "tiny.yaml").write_text(PROFILE)
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    for words in (("init", "-q"), ("remote", "add", "origin", URL), ("add", "-A"), (*identity, "commit", "-qm", "m")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path / "profiles")
    return Path("tiny.yaml")


def deployed(client: SyncPrefectClient, name: str, commit_sha: str) -> str:
    """Make a deployment whose pull step clones a commit; return its full name."""
    flow = client.create_flow_from_name("submitted")
    client.create_deployment(flow, name, pull_steps=[{CLONE: {"repository": "{{ $MO_REPOSITORY }}", "commit_sha": commit_sha}}])
    return f"submitted/{name}"


def asked(profile: Path, deployment: str, **more: str) -> Submission:
    given = {"commit": "", "repository": "", "key": "", **more}
    return Submission(profile, ("verify.seed=1",), deployment=deployment, **given)


def test_submit_starts_one_run_however_often_it_is_called(profile: Path) -> None:
    with get_client(sync_client=True) as client:
        name = deployed(client, "any", ANY_COMMIT)
        first, second = submit(asked(profile, name)), submit(asked(profile, name))
        run = client.read_flow_run(first.flow_run_id)  # type: ignore[arg-type]
    commit = source_commit(profile.resolve().parent)
    assert (first.already, second.already) == (False, True)
    assert first.flow_run_id == second.flow_run_id and first.state == "Scheduled"
    assert first.idempotency_key == f"{URL}@{commit}:profiles/tiny.yaml|verify.seed=1" == run.idempotency_key
    assert run.parameters == {"profile": "profiles/tiny.yaml", "overrides": ["verify.seed=1"]}
    assert run.job_variables == {"env": {"MO_COMMIT": commit, "MO_REPOSITORY": URL}}


def test_a_placeholder_survives_the_deployment_and_is_filled_by_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (ANY_COMMIT, "1" * 40):  # as `prefect deploy` fills prefect.yaml, then as the run's pull step
        monkeypatch.setenv("MO_COMMIT", value)
        assert apply_values({"commit_sha": ANY_COMMIT}, {}) == {"commit_sha": value}


def test_submit_starts_another_run_for_another_commit_or_key(profile: Path) -> None:
    with get_client(sync_client=True) as client:
        name = deployed(client, "others", ANY_COMMIT)
        runs = {submit(asked(profile, name, **more)).flow_run_id for more in ({}, {"commit": "1" * 40}, {"key": "again"})}
    assert len(runs) == 3


def test_submit_refuses_a_deployment_that_would_clone_another_commit(profile: Path) -> None:
    with get_client(sync_client=True) as client:
        name = deployed(client, "pinned", "2" * 40)
        with pytest.raises(ConfigError, match=f"clones commit {'2' * 40}, not {'1' * 40}"):
            submit(asked(profile, name, commit="1" * 40))
        assert submit(asked(profile, name, commit="2" * 40)).commit == "2" * 40


@pytest.mark.parametrize(
    ("more", "words"),
    [({"commit": "main"}, "40 hexadecimal digits"), ({}, "has no deployment 'submitted/absent'; deploy it: MO_COMMIT=")],
)
def test_submit_says_what_is_missing(more: dict[str, str], words: str, profile: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        submit(asked(profile, "submitted/absent", **more))


def test_submit_needs_a_server_and_a_valid_profile(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL")
    with pytest.raises(ConfigError, match="submit needs PREFECT_API_URL"):
        submit(asked(profile, "submitted/any"))
    profile.write_text(f"{PROFILE}sla: {{concurrency: none}}\n")
    with pytest.raises(ConfigError, match=r"tiny\.yaml:5: sla\.concurrency"):
        submit(asked(profile, "submitted/any"))
