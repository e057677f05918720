"""What is told to MLflow, complete and self-contained: a letter can be sent now, later, or by another process."""

import time
from typing import Literal

from pydantic import Field

from model_optimizer.artifacts.base import Frozen


def now_ms() -> int:
    """Return the time in milliseconds since 1970, as MLflow counts it."""
    return time.time_ns() // 1_000_000


class ModelRecord(Frozen):
    """One row of MLflow's Models tab: a candidate, whichever run measures it."""

    record_id: str
    name: str
    """Without `/ : . % " '`, which MLflow refuses."""
    params: dict[str, str] = {}
    tags: dict[str, str] = {}


class DatasetRecord(Frozen):
    """A golden set as input of a run."""

    name: str
    digest: str
    """At most 36 characters."""
    source: str
    num_items: int


class RunRecord(Frozen):
    """One MLflow run, or more about one."""

    record_id: str
    parent_id: str | None
    name: str
    tags: dict[str, str] = {}
    params: dict[str, str] = {}
    metrics: dict[str, float] = {}
    texts: dict[str, str] = {}
    """Artifact file name -> content."""
    model: ModelRecord | None = None
    """The candidate that the metrics are of."""
    datasets: tuple[DatasetRecord, ...] = ()
    untagged: tuple[str, ...] = ()
    """Tags that an earlier try left and that are true no more."""
    finished: bool = True
    failed: bool = False
    started_ms: int | None = None
    at_ms: int = Field(default_factory=now_ms)
    """When this was found out. Law: the same letter sent twice leaves the same figures, because their time is part of it."""


class VersionRecord(Frozen):
    """One registered model version for a bundle: tags and aliases that it is to have."""

    name: str
    source: str
    run_record_id: str
    tags: dict[str, str]
    aliases: tuple[str, ...] = ()
    manifest_sha256: str = ""
    """Finds the version of a bundle that lies in another place than it was made in."""
    model_record_id: str | None = None
    known_only: bool = False
    """Whether a bundle that was never registered is left so."""


class Letter(Frozen):
    """A record with its address."""

    experiment: str
    fresh: bool = False
    """Whether nobody can have told MLflow of this record before: then it is made without being looked for."""
    kind: Literal["run", "version"]
    run: RunRecord | None = None
    version: VersionRecord | None = None
