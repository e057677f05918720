"""The scripts that the workflows call: which profiles to run, who approved, the commit status."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from model_optimizer.paths import REPOSITORY_ROOT

SCRIPTS = REPOSITORY_ROOT / ".ci"
GH = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" > "$CALLED"
while [ $# -gt 0 ]; do [ "$1" = --jq ] && query=$2; shift; done
[ -z "${query:-}" ] || jq --raw-output "$query" <<< "$ANSWER"
"""
"""Stands for GitHub's client: notes its arguments, and answers with what the query makes of ANSWER."""


def call(script: str, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    surroundings = {"PATH": os.environ["PATH"], "GITHUB_REPOSITORY": "owner/models", "GITHUB_RUN_ID": "7", **environment}
    return subprocess.run(
        [SCRIPTS / script, *arguments], cwd=folder, env=surroundings, capture_output=True, text=True, check=False
    )


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two commits: the second changes, adds, moves and deletes profiles, and changes what is none."""
    folder = tmp_path / "models"
    (folder / "profiles" / "hardware").mkdir(parents=True)
    git(tmp_path, "init", "-q", str(folder))
    for name in ("kept", "changed", "moved", "gone", "hardware/gpu"):
        (folder / "profiles" / f"{name}.yaml").write_text(f"name: {name}\n" * 20)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    (folder / "profiles" / "changed.yaml").write_text("name: other\n")
    (folder / "profiles" / "hardware" / "gpu.yaml").write_text("name: other\n")
    (folder / "profiles" / 'ä "$(x)".yaml').write_text("name: new\n")
    (folder / "README.md").write_text("words\n")
    git(folder, "mv", "profiles/moved.yaml", "profiles/new.yaml")
    git(folder, "rm", "-q", "profiles/gone.yaml")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "second")
    return folder


def test_changed_profiles_lists_what_was_added_changed_or_moved(repository: Path) -> None:
    done = call("changed-profiles", "HEAD~1", "HEAD", folder=repository)
    assert json.loads(done.stdout) == ["profiles/changed.yaml", "profiles/new.yaml", 'profiles/ä "$(x)".yaml']
    assert json.loads(call("changed-profiles", "HEAD", "HEAD", folder=repository).stdout) == []


def test_changed_profiles_counts_from_the_first_commit_when_the_one_before_is_unknown(repository: Path) -> None:
    done = call("changed-profiles", "0" * 40, "HEAD", folder=repository)
    assert "profiles/changed.yaml" in json.loads(done.stdout)


def test_asked_profiles_of_a_push_are_those_that_it_changed(repository: Path) -> None:
    heads = {"GITHUB_SHA": git(repository, "rev-parse", "HEAD"), "BEFORE": git(repository, "rev-parse", "HEAD~1")}
    done = call("asked-profiles", folder=repository, **heads)
    assert len(json.loads(done.stdout.removeprefix("profiles="))) == 3


def test_asked_profiles_of_a_relay_pin_the_revision(repository: Path) -> None:
    done = call("asked-profiles", folder=repository, PROFILE="profiles/new.yaml", REVISION="0123456789" * 4)
    assert done.stdout.splitlines() == ['profiles=["profiles/new.yaml"]', f'set=model.revision="{"0123456789" * 4}"']


@pytest.mark.parametrize(
    "asked",
    [
        {"PROFILE": "profiles/gone.yaml"},
        {"PROFILE": "profiles/../../etc/passwd.yaml"},
        {"PROFILE": "profiles/hardware/gpu.yaml"},
        {"PROFILE": 'profiles/ä "$(x)".yaml'},
        {"PROFILE": "profiles/new.yaml\nprofiles=[]"},
        {"PROFILE": "profiles/new.yaml", "REVISION": "main"},
        {"PROFILE": "profiles/new.yaml", "REVISION": "0" * 40 + "\nset=x"},
        {"PROFILE": "profiles/new.yaml", "SET": "a=1\nprofiles=[]"},
    ],
)
def test_asked_profiles_refuses_what_is_no_profile_or_revision(asked: dict[str, str], repository: Path) -> None:
    done = call("asked-profiles", folder=repository, **asked)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("::error title=Refused::") and done.stderr.count("\n") == 1


@pytest.fixture
def github(tmp_path: Path) -> dict[str, str]:
    """The environment of a step that may call GitHub's client, which is a stand-in here."""
    (tmp_path / "bin").mkdir()
    client = tmp_path / "bin" / "gh"
    client.write_text(GH)
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{client.parent}:{os.environ['PATH']}", "CALLED": str(tmp_path / "called")}


def approval(login: str, environment: str = "model-signoff", state: str = "approved", comment: str = "") -> dict[str, object]:
    return {"state": state, "comment": comment, "environments": [{"name": environment}], "user": {"login": login}}


def test_approval_names_the_last_reviewer_of_the_environment(github: dict[str, str], tmp_path: Path) -> None:
    given = [
        approval("ann"),
        approval("bob", comment="read it\nreviewer=eve"),
        approval("eve", "prefect"),
        approval("eve", state="rejected"),
    ]
    done = call("approval", "model-signoff", folder=tmp_path, ANSWER=json.dumps(given), **github)
    assert done.stdout == "reviewer=bob\nreview=read it reviewer=eve\n"
    assert Path(github["CALLED"]).read_text().splitlines()[:2] == ["api", "repos/owner/models/actions/runs/7/approvals"]


@pytest.mark.parametrize("given", [[], [approval("eve", "prefect")], [approval("eve", state="rejected")]])
def test_approval_fails_when_nobody_approved(given: list[object], github: dict[str, str], tmp_path: Path) -> None:
    done = call("approval", "model-signoff", folder=tmp_path, ANSWER=json.dumps(given), **github)
    assert (done.returncode, done.stdout) == (1, "")
    assert "required reviewers" in done.stderr


@pytest.mark.parametrize(
    ("where", "link"),
    [("", "https://github.test/owner/models/actions/runs/7"), ("https://prefect.test/runs/1", "https://prefect.test/runs/1")],
)
def test_commit_status_is_within_githubs_lengths(where: str, link: str, github: dict[str, str], tmp_path: Path) -> None:
    said = {"STATE": "failure", "DESCRIPTION": "漢" * 200, "CONTEXT": "model-optimizer/profiles/a.yaml", "WHERE": where}
    surroundings = {"GITHUB_SERVER_URL": "https://github.test", "GITHUB_SHA": "0" * 40, "LC_ALL": "C.UTF-8"}
    done = call("commit-status", folder=tmp_path, **said, **surroundings, **github)
    assert done.returncode == 0, done.stderr
    fields = dict(it.partition("=")[::2] for it in Path(github["CALLED"]).read_text().splitlines() if "=" in it)
    assert fields == {
        "state": "failure",
        "context": "model-optimizer/profiles/a.yaml",
        "description": "漢" * 140,
        "target_url": link,
    }
