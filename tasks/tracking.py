"""MLflow, and nowhere else: one parent run per flow run, one child per stage, one grandchild per candidate.

A tracking server that is down never fails a run: what could not be sent is spooled to disk and sent at
the start of a later run. Every record has an identity of its own (tag `mo.record_id`), so sending it
twice, after a Retry or from the spool, lands in the same MLflow run. Runs of one folder send one after
another, because a record is looked up before it is made and SQLite has one writer.
"""

import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from model_optimizer.artifacts.base import Frozen
from model_optimizer.store import write_atomically

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

RECORD_ID = "mo.record_id"
REFUSED = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST", "PERMISSION_DENIED", "UNAUTHENTICATED")
"""Answers of a server that is up and will not change its mind: such a record is dropped with a warning, not spooled."""

BUSY_S = 60
"""How long SQLite waits for another writer, e.g. a user's `mlflow ui`."""


class RunRecord(Frozen):
    """One MLflow run, complete: it can be sent now or later."""

    record_id: str
    parent_id: str | None
    name: str
    tags: dict[str, str] = {}
    params: dict[str, str] = {}
    metrics: dict[str, float] = {}
    texts: dict[str, str] = {}
    """Artifact file name -> content."""
    finished: bool = True
    failed: bool = False


class VersionRecord(Frozen):
    """One registered model version for a bundle."""

    name: str
    source: str
    run_record_id: str
    tags: dict[str, str]
    alias: str


class Tracker:
    """Sends records to MLflow or spools them."""

    def __init__(self, root: Path, experiment: str):
        self._root = root
        self._experiment = experiment
        self._spool = root / "spool"
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._run_ids: dict[str, str] = {}
        self._turn = filelock.FileLock(root / "mlflow.lock")
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}?timeout={BUSY_S}"
        self.down_because: str | None = None

    def record(self, record: RunRecord) -> str | None:
        """Send one run; return its MLflow run id, or None when it was spooled."""
        return self._send_or_keep(record)

    def register(self, record: VersionRecord) -> str | None:
        """Register a version once per bundle; return its number, or None when it was spooled."""
        return self._send_or_keep(record)

    def send_spooled(self) -> int:
        """Send what earlier runs could not; return how many records were sent."""
        with self._turn:
            return self._send_waiting()

    def _send_waiting(self) -> int:
        waiting = sorted(self._spool.glob("*.json")) if self._spool.is_dir() else []
        sent = 0
        for path in waiting:
            if not self._reachable():
                break
            kind, body = json.loads(path.read_bytes())
            record = (RunRecord if kind == "run" else VersionRecord).model_validate(body)
            if self._send(record) is None:
                break
            path.unlink()
            sent += 1
        return sent

    def _send_or_keep(self, record: RunRecord | VersionRecord) -> str | None:
        with self._turn:
            if self._reachable():
                return self._send(record)
        self._keep(record)
        return None

    def _send(self, record: RunRecord | VersionRecord) -> str | None:
        """Send one record; on failure remember that the server is down, and spool."""
        from mlflow.exceptions import MlflowException

        try:
            return self._send_run(record) if isinstance(record, RunRecord) else self._send_version(record)
        except _failures() as error:
            if isinstance(error, MlflowException) and error.error_code in REFUSED:
                log.warning("MLflow at %s refuses a record: %s", self.uri, _one_line(error))
                return None
            self._note_down(error)
            self._keep(record)
            return None

    def _note_down(self, error: Exception) -> None:
        self.down_because = _one_line(error)
        log.warning("MLflow at %s does not answer (%s); records are kept in %s", self.uri, self.down_because, self._spool)

    def _keep(self, record: RunRecord | VersionRecord) -> None:
        kind = "run" if isinstance(record, RunRecord) else "version"
        path = self._spool / f"{time.time_ns()}-{kind}.json"
        write_atomically(path, json.dumps([kind, record.model_dump(mode="json")]).encode())

    def _reachable(self) -> bool:
        """Open the client and the experiment once."""
        if self._client is not None:
            return self.down_because is None
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        try:
            self._experiment_id = self._open_experiment(self._client)
        except _failures() as error:
            self._note_down(error)
        return self.down_because is None

    def _open_experiment(self, client: "MlflowClient") -> str:
        found = client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        location = (self._root / "mlartifacts").as_uri() if self.uri.startswith("sqlite:") else None
        return str(client.create_experiment(self._experiment, artifact_location=location))

    def _send_run(self, record: RunRecord) -> str:
        from mlflow.entities import Metric, Param, RunTag

        client = self._client
        assert client is not None
        run_id = self._run_id(record)
        now = time.time_ns() // 1_000_000
        client.log_batch(
            run_id,
            metrics=[Metric(name, value, now, 0) for name, value in record.metrics.items()],
            params=[Param(name, value[:6000]) for name, value in record.params.items()],
            tags=[RunTag(name, value[:5000]) for name, value in record.tags.items()],
        )
        for name, text in record.texts.items():
            client.log_text(run_id, text, name)
        if record.finished:
            client.set_terminated(run_id, status="FAILED" if record.failed else "FINISHED")
        return run_id

    def _run_id(self, record: RunRecord) -> str:
        """Return the run of this record, found by its tag or made below its parent."""
        if record.record_id in self._run_ids:
            return self._run_ids[record.record_id]
        client = self._client
        assert client is not None
        found = client.search_runs([self._experiment_id], f"tags.`{RECORD_ID}` = '{record.record_id}'", max_results=1)
        if found:
            run_id = str(found[0].info.run_id)
        else:
            tags = {RECORD_ID: record.record_id, "mlflow.runName": record.name}
            if record.parent_id is not None:
                tags["mlflow.parentRunId"] = self._run_id(
                    RunRecord(record_id=record.parent_id, parent_id=None, name=record.parent_id)
                )
            run_id = str(client.create_run(self._experiment_id, tags=tags, run_name=record.name).info.run_id)
        self._run_ids[record.record_id] = run_id
        return run_id

    def _send_version(self, record: VersionRecord) -> str:
        from mlflow.exceptions import MlflowException

        client = self._client
        assert client is not None
        try:
            client.get_registered_model(record.name)
        except MlflowException:
            client.create_registered_model(record.name)
        version = next(
            (v for v in client.search_model_versions(f"name = '{record.name}'") if v.source == record.source),
            None,
        )
        if version is None:
            run_id = self._run_ids.get(record.run_record_id)
            version = client.create_model_version(record.name, source=record.source, run_id=run_id)
        for name, value in record.tags.items():
            client.set_model_version_tag(record.name, version.version, name, value)
        client.set_registered_model_alias(record.name, record.alias, version.version)
        return str(version.version)


def _failures() -> tuple[type[Exception], ...]:
    """Return what a server or database that cannot be used raises."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, RequestException, SQLAlchemyError, OSError


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
