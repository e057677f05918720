"""Who made a commit and started a run, and how a record reads in Prefect."""

import subprocess
from pathlib import Path

import pytest

from flows.approval import authors_of, signoff_markdown
from model_optimizer.artifacts.release import SignOff, Waiver


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_authors_of_names_author_committer_logins_and_who_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "GIT_AUTHOR_NAME": "Ann Author",
        "GIT_AUTHOR_EMAIL": "12345+ann@users.noreply.github.com",
        "GIT_COMMITTER_NAME": "GitHub",
        "GIT_COMMITTER_EMAIL": "noreply@github.com",
        "GITHUB_ACTOR": "merger",
        "LOGNAME": "worker",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GITHUB_TRIGGERING_ACTOR", raising=False)
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    made = ("Ann Author", "12345+ann@users.noreply.github.com", "GitHub", "noreply@github.com", "ann")
    assert authors_of(tmp_path, commit) == (*made, "merger", "worker")
    assert authors_of(tmp_path, "unknown") == ("merger", "worker")
    assert authors_of(tmp_path, "0" * 40) == ("merger", "worker")


def test_signoff_markdown_shows_waivers_and_escapes_what_people_write() -> None:
    found = SignOff(
        bundle="chat-v1",
        bundle_manifest_sha256="a" * 64,
        signature_sha256="b" * 64,
        report_sha256="c" * 64,
        optimizer_hash="d" * 64,
        gates=(),
        verdict=None,
        decision="signed-off",
        level="final",
        reviewer="ann | <b>",
        identity="claimed",
        method="form",
        waivers=(Waiver(gate="speed_ratio", reason="demo\nonly"),),
        signed_at="2029-12-01T00:00:00+00:00",
    )
    lines = signoff_markdown(found).splitlines()
    assert lines[0] == "# Sign-off of chat-v1"
    assert "| decision | signed-off, level final |" in lines
    assert r"| reviewer | ann \| \<b\> |" in lines
    assert r"| waived: speed\_ratio | demo only |" in lines
