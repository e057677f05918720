"""The provenance names the commit of the checkout that the profile lies in, wherever the command was started."""

import subprocess
from pathlib import Path

import pytest

from flows.optimize import source_commit


def _git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    return subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_source_commit_is_that_of_the_profiles_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_SHA", raising=False)
    (tmp_path / "repository").mkdir()
    _git(tmp_path / "repository", "init", "-q")
    _git(tmp_path / "repository", "commit", "-q", "--allow-empty", "-m", "first")
    assert source_commit(tmp_path / "repository") == _git(tmp_path / "repository", "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "plain").mkdir()
    assert source_commit(tmp_path / "plain") == "unknown"
