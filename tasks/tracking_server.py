"""MLflow, and nowhere else: how a letter becomes runs, models, versions and aliases.

Every record has an identity of its own (tag `mo.record_id`), so that sending it twice, after a Retry or after
a kill in the middle, lands in the same place.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from gzip import compress, decompress
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.letters import Letter, ModelRecord, RunRecord, VersionRecord

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

RECORD_ID = "mo.record_id"
MANIFEST = "mo.manifest_sha256"
SOURCE = "mo.source"
REFUSED = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST", "PERMISSION_DENIED", "UNAUTHENTICATED")
"""Answers of a server that is up and will not change its mind."""

ENDED = ("FINISHED", "FAILED")
BUSY_S = 60
"""How long SQLite waits for another writer, e.g. a user's `mlflow ui`."""

KIND = {"mlflow.experimentKind": "custom_model_development"}
"""MLflow's page then shows models where it would show agents."""

PACKED = ".gz"
PREVIEW_BYTES = 1_000_000
"""MLflow's page hangs on larger previews, so what is larger is packed. Source: mlflow issues 3384 and 1077."""


class Unreachable(Exception):
    """The server does not answer, or not in time; the letter may be sent again."""


class Refused(Exception):
    """The server answers, and will never take this."""


def tracking_uri(root: Path) -> str:
    """Return where runs are recorded: MLFLOW_TRACKING_URI, else a database in `root`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}?timeout={BUSY_S}"


def load() -> None:
    """Import MLflow, which takes seconds."""
    # a request that was answered too late is not sent again blindly: what it made is looked for first
    for name, value in (("HTTP_REQUEST_MAX_RETRIES", "0"), ("HTTP_REQUEST_TIMEOUT", "10"), ("DISABLE_TELEMETRY", "true"),
                        ("SUPPRESS_PRINTING_URL_TO_STDOUT", "true")):  # fmt: skip
        os.environ.setdefault(f"MLFLOW_{name}", value)
    import mlflow.tracking  # noqa: F401


@dataclass(frozen=True)
class FetchedRun:
    """A run as MLflow has it."""

    name: str
    text: str | None
    """Of the file that was asked for; None where there is no such one."""
    datasets: dict[str, str]
    """Golden set -> digest."""


@dataclass
class MlflowServer:
    """One tracking server or database."""

    uri: str
    root: Path
    _client: "MlflowClient | None" = None
    _experiments: dict[str, str] = field(default_factory=dict)
    _run_ids: dict[str, str] = field(default_factory=dict)
    _model_ids: dict[str, str] = field(default_factory=dict)
    _makers: dict[str, str] = field(default_factory=dict)
    """Logged model -> the run that made it."""
    _ended: set[str] = field(default_factory=set)
    """Runs that had ended before this process looked for them."""

    @property
    def client(self) -> "MlflowClient":
        if self._client is None:
            load()
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        return self._client

    def send(self, letter: Letter, *, is_new: bool) -> None:
        """Send one letter; `is_new` says that nothing of it can be there yet.

        Raises:
            Unreachable: the server does not answer.
            Refused: it will never take this letter.
        """
        with _told_apart():
            if letter.run is not None:
                self._send_run(letter.run, self._experiment(letter.experiment), is_new)
            if letter.version is not None:
                self._send_version(letter.version, letter.experiment)

    def fetch(self, run_id: str, name: str) -> "FetchedRun":
        """Return a run with the content of one of its files.

        Raises:
            Unreachable: the server does not answer.
            Refused: there is no such run.
        """
        with _told_apart(), tempfile.TemporaryDirectory() as folder:
            run = self.client.get_run(run_id)
            paths = {item.path for item in self.client.list_artifacts(run_id)}
            content = None
            if found := next((it for it in (name, f"{name}{PACKED}") if it in paths), None):
                content = Path(self.client.download_artifacts(run_id, found, folder)).read_bytes()
                content = decompress(content) if found.endswith(PACKED) else content
            datasets = {it.dataset.name: it.dataset.digest for it in run.inputs.dataset_inputs} if run.inputs else {}
            return FetchedRun(run.info.run_name or run_id, content.decode() if content is not None else None, datasets)

    def answers(self) -> bool:
        """Return whether the server answers the simplest question."""
        try:
            with _told_apart():
                self.client.search_experiments(max_results=1)
        except (Unreachable, Refused):
            return False
        return True

    def forget(self) -> None:
        """Look everything up again: the server that answers next may be another one."""
        for known in (self._experiments, self._run_ids, self._model_ids):
            known.clear()

    def _experiment(self, name: str) -> str:
        if name not in self._experiments:
            found = self.client.get_experiment_by_name(name)
            location = (self.root / "mlartifacts").as_uri() if self.uri.startswith("sqlite:") else None
            self._experiments[name] = str(found.experiment_id if found else self.client.create_experiment(name, location, KIND))
        return self._experiments[name]

    def _send_run(self, record: RunRecord, experiment_id: str, is_new: bool) -> None:
        run_id = self._run_id(record, experiment_id, is_new)
        model_id = self._model_id(record.model, (experiment_id, run_id), is_new) if record.model else None
        self._log_figures(record, run_id, model_id)
        if record.datasets or (model_id and self._makers[model_id] != run_id):
            self._log_inputs(record, run_id, model_id)
        if record.texts:
            self._log_texts(record.texts, run_id)
        for name in record.untagged:
            self._untag(run_id, name)
        if record.finished and (record.parent_id is None or run_id not in self._ended):  # a Retry lengthens its own run alone
            status = "FAILED" if record.failed else "FINISHED"
            self.client.set_terminated(run_id, status=status, end_time=record.at_ms)

    def _run_id(self, record: RunRecord, experiment_id: str, is_new: bool) -> str:
        """Return the run of this record, known, found by its tag, or made below its parent."""
        if record.record_id in self._run_ids:
            return self._run_ids[record.record_id]
        found = [] if is_new else self.client.search_runs([experiment_id], _tagged(record.record_id), max_results=1)
        if found:
            run_id = str(found[0].info.run_id)
            self._ended |= {run_id} if found[0].info.status in ENDED else set()
        else:
            tags = {RECORD_ID: record.record_id, "mlflow.runName": record.name}
            if record.parent_id is not None:
                parent = RunRecord(record_id=record.parent_id, parent_id=None, name=record.parent_id)
                tags["mlflow.parentRunId"] = self._run_id(parent, experiment_id, False)
            start = record.started_ms or record.at_ms
            run = self.client.create_run(experiment_id, start_time=start, tags=tags, run_name=record.name)
            run_id = str(run.info.run_id)
        self._run_ids[record.record_id] = run_id
        return run_id

    def _model_id(self, model: ModelRecord, place: tuple[str, str], is_new: bool) -> str:
        """Return the logged model of a candidate, known, found by its tag, or made by the run in `place`."""
        if model.record_id in self._model_ids:
            return self._model_ids[model.record_id]
        from mlflow.entities import LoggedModelOutput

        experiment_id, run_id = place
        query = _tagged(model.record_id)
        found = [] if is_new else self.client.search_logged_models([experiment_id], query, max_results=1)
        if found:
            model_id = str(found[0].model_id)
        else:
            tags = model.tags | {RECORD_ID: model.record_id}
            made = self.client.create_logged_model(
                experiment_id, model.name, run_id, tags=tags, params=model.params, model_type="candidate"
            )
            model_id = str(made.model_id)
            self.client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])
        self.client.finalize_logged_model(model_id, "READY")
        self._model_ids[model.record_id] = model_id
        self._makers[model_id] = str(found[0].source_run_id) if found else run_id
        return model_id

    def _log_figures(self, record: RunRecord, run_id: str, model_id: str | None) -> None:
        """Log metrics, tags and parameters in one request; a parameter that changed after a Retry is refused, the rest is not."""
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException

        metrics = [
            Metric(name, value, record.at_ms, 0, model_id=model_id, run_id=run_id) for name, value in record.metrics.items()
        ]
        params = [Param(name, value[:6000]) for name, value in record.params.items()]
        tags = [RunTag(name, value[:5000]) for name, value in record.tags.items()]
        try:
            self.client.log_batch(run_id, metrics=metrics, params=params, tags=tags)
        except MlflowException as error:
            if not params or error.error_code not in REFUSED:
                raise
            self.client.log_batch(run_id, metrics=metrics, tags=tags)

    def _untag(self, run_id: str, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.delete_tag(run_id, name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise

    def _log_inputs(self, record: RunRecord, run_id: str, model_id: str | None) -> None:
        """Link golden sets, and the candidate that another run made."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput

        inputs = [
            DatasetInput(
                Dataset(it.name, it.digest, "local", it.source, profile=f'{{"num_items": {it.num_items}}}'),
                [InputTag("mlflow.data.context", "evaluation")],
            )
            for it in record.datasets
        ]
        models = [LoggedModelInput(model_id)] if model_id and self._makers[model_id] != run_id else []
        self.client.log_inputs(run_id, inputs, models)

    def _log_texts(self, texts: dict[str, str], run_id: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts.items():
                content = text.encode()
                packed = len(content) > PREVIEW_BYTES
                Path(folder, f"{name}{PACKED}" if packed else name).write_bytes(compress(content, mtime=0) if packed else content)
            self.client.log_artifacts(run_id, folder)

    def _send_version(self, record: VersionRecord, experiment: str) -> None:
        version = self._version(record) or self._new_version(record, experiment)
        if version is None:
            return
        for name, value in record.tags.items():
            if version.tags.get(name) != value:
                self.client.set_model_version_tag(record.name, version.version, name, value[:5000])
        for alias in record.aliases:
            self.client.set_registered_model_alias(record.name, alias, version.version)

    def _version(self, record: VersionRecord) -> "ModelVersion | None":
        versions = self.client.search_model_versions(f"name = '{record.name}'")
        digest = record.manifest_sha256 or record.tags.get(MANIFEST)
        same = [it for it in versions if it.tags.get(SOURCE) == record.source or (digest and it.tags.get(MANIFEST) == digest)]
        return max(same, key=lambda it: int(it.version), default=None)

    def _new_version(self, record: VersionRecord, experiment: str) -> "ModelVersion | None":
        from mlflow.exceptions import MlflowException

        if record.known_only:
            return None
        try:
            self.client.create_registered_model(record.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        run_id = self._known(record.run_record_id, experiment, self._run_ids, self._find_run)
        model_id = self._known(record.model_record_id, experiment, self._model_ids, self._find_model)
        tags = record.tags | {SOURCE: record.source}
        source = self._source(record.source, model_id)
        return self.client.create_model_version(record.name, source=source, run_id=run_id, tags=tags, model_id=model_id)

    def _source(self, bundle: str, model_id: str | None) -> str:
        """Return what stands as a version's source: a server takes no path of its clients' disks."""
        if self.uri.startswith("sqlite:"):
            return bundle
        return f"models:/{model_id}" if model_id else bundle.replace("file:", "bundle:", 1)

    def _known(
        self, record_id: str | None, experiment: str, known: dict[str, str], find: Callable[[str, str], str | None]
    ) -> str | None:
        if not record_id or not experiment:
            return None
        return known.get(record_id) or find(self._experiment(experiment), record_id)

    def _find_run(self, experiment_id: str, record_id: str) -> str | None:
        found = self.client.search_runs([experiment_id], _tagged(record_id), max_results=1)
        return str(found[0].info.run_id) if found else None

    def _find_model(self, experiment_id: str, record_id: str) -> str | None:
        found = self.client.search_logged_models([experiment_id], _tagged(record_id), max_results=1)
        return str(found[0].model_id) if found else None


def _tagged(record_id: str) -> str:
    return f"tags.`{RECORD_ID}` = '{record_id}'"


@contextmanager
def _told_apart() -> Iterator[None]:
    """Tell a server that is away from one that refuses."""
    load()
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code in (*REFUSED, "RESOURCE_DOES_NOT_EXIST"):
            raise Refused(_one_line(error)) from error
        raise Unreachable(_one_line(error)) from error
    except _failures() as error:
        raise Unreachable(_one_line(error)) from error


def _failures() -> tuple[type[Exception], ...]:
    """Return what a server, a database or a store of artifacts that cannot be used raises."""
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    found: list[type[Exception]] = [RequestException, SQLAlchemyError, OSError, ImportError]
    try:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:  # artifacts do not lie in S3, or ImportError says that they do
        return tuple(found)
    return (*found, Boto3Error, BotoCoreError, ClientError)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
