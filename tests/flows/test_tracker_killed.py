"""The tracking server is killed in mid-run: the run ends as ever, and what it could not record follows with the next."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from outside import model_optimizer_command, own_surroundings, wait_until
from services import MlflowProcess

from model_optimizer.artifacts.base import Stage
from tasks.tracking_server import RECORD_ID
from tests.tiny import write_project

PARENT = "mlflow.parentRunId"
DECIDED = (0, 5)
"""A tiny model's speed may be too noisy to decide; the run is complete all the same."""


def _start(profile: Path, home: Path, uri: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        model_optimizer_command("run", str(profile), "--json"),
        cwd=profile.parent,
        env={**own_surroundings(), "MODEL_OPTIMIZER_HOME": str(home), "MLFLOW_TRACKING_URI": uri},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _runs(uri: str) -> list[Run]:
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name("model-optimizer/tiny")
    assert found is not None
    return list(client.search_runs([found.experiment_id], max_results=1000))


@pytest.mark.full
def test_a_run_outlives_its_tracking_server_and_loses_and_doubles_no_record(tmp_path: Path, tiny_llama: Path) -> None:
    profile, home = write_project(tmp_path / "project", tiny_llama), tmp_path / "home"
    server = MlflowProcess(tmp_path, f"sqlite:///{tmp_path / 'server.db'}", (tmp_path / "files").as_uri())
    server.start()
    try:
        first = _start(profile, home, server.uri)
        wait_until(lambda: any((home / "store" / Stage.SCAN).glob("*/artifact.json")) or first.poll() is not None)
        server.kill()
        said = first.communicate()[1]
        assert first.returncode in DECIDED and "attempted to send logs" not in said, said
        assert list((home / "spool").glob("*.json")) and (home / "bundles" / "tiny-v1").is_dir()

        server.start()
        second = _start(profile, home, server.uri)
        said = second.communicate()[1]
        assert second.returncode == first.returncode, said
        assert not list((home / "spool").glob("*.json"))

        runs = _runs(server.uri)
        records = Counter(run.data.tags[RECORD_ID] for run in runs)
        assert set(records.values()) == {1}
        parents = [run for run in runs if PARENT not in run.data.tags]
        assert [run.info.status for run in parents] == ["FAILED" if first.returncode else "FINISHED"] * 2
        for parent in parents:
            own = {record.rpartition("/")[2] for record in records if record.startswith(parent.data.tags[RECORD_ID] + "/")}
            assert {str(stage) for stage in Stage} <= own, own
        client = MlflowClient(tracking_uri=server.uri)
        (version,) = client.search_model_versions("name = 'tiny'")
        aliases = ["candidate"] if first.returncode else ["candidate", "signed-off"]
        assert client.get_registered_model("tiny").aliases == dict.fromkeys(aliases, version.version)
    finally:
        server.kill()
