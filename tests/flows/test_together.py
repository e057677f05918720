"""Two runs of one profile at once, in one folder, from nothing: they share the work and the databases survive."""

import json
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from outside import made_at, model_optimizer_command, own_surroundings
from tiny import write_project

from model_optimizer.artifacts.base import Stage
from model_optimizer.release.verify import verify_bundle

DONE = (0, 3, 5)
"""Exit codes of a run that came to its end: accepted, rejected, not decided."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("together")
    write_project(folder, tiny_llama)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict[str, Any]]:
    """The documents of two runs that were started in the same moment."""
    command = model_optimizer_command("run", "tiny.yaml", "--json", "--set", "scan.runtimes=[torch]")
    processes = []
    for number in range(2):
        with (folder / f"{number}.json").open("wb") as out, (folder / f"{number}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, cwd=folder, env=own_surroundings(), stdout=out, stderr=log))
    codes = [process.wait(600) for process in processes]
    logs = "".join((folder / f"{number}.log").read_text() for number in range(2))
    assert set(codes) <= set(DONE) and "locked" not in logs, logs
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(2)]


def test_two_runs_at_once_make_every_stage_once(folder: Path, outcomes: list[dict[str, Any]]) -> None:
    once = dict.fromkeys(("profile", "scan", "memory", "verify", "package"), 1)  # the others have an entry per candidate
    assert {stage: [outcome["stages"][stage] for outcome in outcomes].count(False) for stage in once} == once
    kinds = [entry.partition("/")[0] for entry in made_at(folder / ".model-optimizer")]
    assert {kind: kinds.count(kind) for kind in once} == once


def test_two_runs_at_once_release_one_bundle(folder: Path, outcomes: list[dict[str, Any]]) -> None:
    assert outcomes[0]["manifest_sha256"] == outcomes[1]["manifest_sha256"]
    bundles = folder / ".model-optimizer" / "bundles"
    assert sorted(path.name for path in bundles.glob("tiny-v*/")) == ["tiny-v0", "tiny-v1"]
    facts = verify_bundle(bundles / "tiny-v1", public_key=next((folder / "signer").glob("*.pub")))
    assert facts.manifest_sha256 == outcomes[0]["manifest_sha256"]


def test_two_runs_at_once_are_tracked_whole(folder: Path, outcomes: list[dict[str, Any]]) -> None:
    home = folder / ".model-optimizer"
    assert len(outcomes) == 2 and list(home.glob("spool/*")) == []
    client = MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("model-optimizer/tiny")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], max_results=1000)
    parents = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 2 and len(client.search_model_versions("name = 'tiny'")) == 1
    for parent in parents:
        children = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
        assert len(children) == len(Stage)
        assert {run.info.status for run in children} == {"FINISHED"}


@pytest.mark.parametrize("database", ["mlflow.db", "prefect/prefect.db"])
def test_two_runs_at_once_leave_databases_intact(folder: Path, outcomes: list[dict[str, Any]], database: str) -> None:
    with sqlite3.connect(folder / ".model-optimizer" / database) as connection:
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
    assert len(outcomes) == 2


def test_two_runs_at_once_share_one_server_that_ends_with_them(folder: Path, outcomes: list[dict[str, Any]]) -> None:
    with sqlite3.connect(folder / ".model-optimizer" / "prefect" / "prefect.db") as connection:
        states = connection.execute("select state_type, count(*) from flow_run group by state_type").fetchall()
    assert sum(number for _, number in states) == 2 and {state for state, _ in states} <= {"COMPLETED", "FAILED"}
    assert len(outcomes) == 2
