"""Tracking against real servers: PostgreSQL and S3 behind MLflow, killed in the middle, answers lost, silence."""

import http.client
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from mlflow.tracking import MlflowClient
from moto.server import ThreadedMotoServer
from outside import wait_until
from services import MlflowProcess, free_port, postgres

from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from tasks.facts import candidate_model
from tasks.letters import RunRecord, VersionRecord
from tasks.tracking import Tracker

STRATEGY = Strategy(weights=WeightRecipe(method="rtn", formats=("int8-channel",)), runtime="torch")
BUCKET = "artifacts"
BEGAN_MS = 1_800_000_000_000


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 service in this process; yields its address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def keys(s3: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "MLFLOW_S3_ENDPOINT_URL": s3,
    }


@pytest.fixture(scope="module")
def server(s3: str, keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowProcess]:
    """MLflow with its runs in PostgreSQL and its files in S3."""
    bucket(s3).create_bucket(Bucket=BUCKET)
    with postgres() as database:
        process = MlflowProcess(tmp_path_factory.mktemp("server"), database, f"s3://{BUCKET}/mlflow", keys)
        process.start()
        yield process
        process.kill()


@pytest.fixture
def experiment(request: pytest.FixtureRequest) -> str:
    return f"model-optimizer/{request.node.name}"


def bucket(s3: str):  # type: ignore[no-untyped-def]
    return boto3.client("s3", endpoint_url=s3, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test")


def numbered(number: int) -> RunRecord:
    return RunRecord(
        record_id=f"run-{number}", parent_id="parent", name=f"run-{number}", metrics={"x": float(number)}, at_ms=BEGAN_MS + number
    )


def names_of(uri: str, experiment: str) -> list[str]:
    """Return the names of all runs, oldest first."""
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    runs = client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"], max_results=1000)
    return [run.info.run_name for run in runs]


@pytest.mark.full
def test_runs_models_versions_and_files_lie_in_postgresql_and_s3(
    server: MlflowProcess, s3: str, experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    tracker = Tracker(tmp_path, experiment, first_try=True)
    tracker.record(RunRecord(record_id="parent", parent_id=None, name="parent", at_ms=BEGAN_MS - 1, finished=False))
    tracker.record(
        RunRecord(
            record_id="scan",
            parent_id="parent",
            name="2-scan",
            metrics={"accuracy/kl_nats": 0.25},
            texts={"explanation.md": "# scan", "chosen.json": json.dumps({"a": 1})},
            model=candidate_model("parent", STRATEGY, {}),
        )
    )
    version = VersionRecord(
        name="chat",
        source="file:///bundles/chat-v1",
        run_record_id="parent",
        model_record_id=f"parent/model/{STRATEGY.label}",
        tags={"mo.manifest_sha256": "aa"},
        aliases=("candidate",),
    )
    tracker.register(version)
    assert tracker.flush() and not list((tmp_path / "spool").glob("*.json"))

    client = MlflowClient(tracking_uri=server.uri, registry_uri=server.uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (model,) = client.search_logged_models([found.experiment_id])
    assert (model.params["precision"], [metric.value for metric in model.metrics or []]) == ("int8", [0.25])
    filed = client.get_model_version_by_alias("chat", "candidate")
    assert (filed.source, filed.tags["mo.source"]) == (f"models:/{model.model_id}", "file:///bundles/chat-v1")
    stored = {item["Key"].rpartition("/")[2] for item in bucket(s3).list_objects_v2(Bucket=BUCKET)["Contents"]}
    assert stored == {"explanation.md", "chosen.json"}


@pytest.mark.full
def test_every_record_arrives_once_and_in_order_when_the_server_is_killed_in_the_middle(
    server: MlflowProcess, experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    tracker = Tracker(tmp_path, experiment, first_try=True)
    tracker.record(RunRecord(record_id="parent", parent_id=None, name="parent", at_ms=BEGAN_MS - 1, finished=False))
    assert tracker.flush()
    for number in range(10):
        tracker.record(numbered(number))
    wait_until(lambda: len(list((tmp_path / "spool").glob("*.json"))) < 8)
    server.kill()
    began = time.monotonic()
    for number in range(10, 20):
        tracker.record(numbered(number))
    assert time.monotonic() - began < 1.0  # the run itself does not wait
    assert tracker.flush() and len(list((tmp_path / "spool").glob("*.json"))) >= 10
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "does not answer" in warnings[0]

    server.start()
    later = Tracker(tmp_path, experiment)  # another run of this folder
    assert later.flush()
    wait_until(lambda: tracker.flush() and not list((tmp_path / "spool").glob("*.json")))
    assert names_of(server.uri, experiment) == ["parent", *(f"run-{number}" for number in range(20))]


@pytest.mark.full
def test_no_record_is_doubled_when_answers_are_lost(
    server: MlflowProcess, experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with losing_answers(server.port, every=11) as (uri, lost):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        tracker = Tracker(tmp_path, experiment, first_try=True)
        for number in range(12):
            tracker.record(numbered(number))
        wait_until(lambda: tracker.flush() and not list((tmp_path / "spool").glob("*.json")))
    assert len(lost) >= 4 and "/api/2.0/mlflow/runs/create" in lost
    counts = Counter(names_of(server.uri, experiment))
    assert counts == Counter({"parent": 1} | {f"run-{number}": 1 for number in range(12)})


def test_a_server_that_never_answers_holds_nobody_up(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracker = Tracker(tmp_path, experiment)
        began = time.monotonic()
        for number in range(5):
            tracker.record(numbered(number))
        assert time.monotonic() - began < 0.5
        assert not tracker.flush(0.2)
        assert tracker.flush(20)
    assert len(list((tmp_path / "spool").glob("*.json"))) == 5
    assert sum("does not answer" in record.message for record in caplog.records) == 1


class losing_answers:
    """A proxy that passes every request on and, every so often, drops the answer."""

    def __init__(self, port: int, *, every: int):
        self._lost: list[str] = []
        lost, counter = self._lost, Counter[str]()

        class Handler(BaseHTTPRequestHandler):
            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                connection = http.client.HTTPConnection("127.0.0.1", port)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
                counter["all"] += 1
                if counter["all"] % every == 0:
                    lost.append(self.path)
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = do_PUT = _pass_on

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)

    def __enter__(self) -> tuple[str, list[str]]:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}", self._lost

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
