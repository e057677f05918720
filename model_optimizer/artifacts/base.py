"""What every stage result shares: immutability, file references, identity by content.

`Tree` and `Stored` are how a stage's inputs name other data: the digest or key is part of the
identity, the place on disk is not (it is excluded from serialisation, hence from every key).
"""

import hashlib
import os
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from model_optimizer.artifacts.measure import Measure
from model_optimizer.decisions import Decision
from model_optimizer.stages import Stage as Stage


class Frozen(BaseModel):
    """Base of everything that is written to disk: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRef(Frozen):
    """A file inside a store entry or bundle: path relative to its directory, size and sha256."""

    path: str
    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @classmethod
    def of(cls, root: Path, path: Path) -> "FileRef":
        """Hash the file at `path`, which lies below `root`."""
        return cls(path=path.relative_to(root).as_posix(), num_bytes=path.stat().st_size, sha256=file_sha256(path))


def file_sha256(path: Path) -> str:
    """Return the hexadecimal sha256 of a file's content, read in 1 MiB pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tree_digest(root: Path) -> str:
    """Return one sha256 over the names and contents of all files below `root` (or of the file `root`).

    Law: equal for two directories exactly when they hold the same relative paths with the same bytes.
    """
    if root.is_file():
        return file_sha256(root)
    digest = hashlib.sha256()
    for directory, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = Path(directory, name)
            digest.update(f"{path.relative_to(root).as_posix()}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


class Tree(Frozen):
    """A file or directory known by its content; `path` says where it lies and is no part of its identity."""

    digest: str
    path: Path = Field(exclude=True)

    @classmethod
    def of(cls, path: Path) -> "Tree":
        """Digest what lies at `path`."""
        return cls(digest=tree_digest(path), path=path)


class StageArtifact(Frozen):
    """The result of one stage. Files are relative to the store entry that holds the artifact."""

    files: tuple[FileRef, ...] = ()
    measures: tuple[Measure, ...] = ()
    decisions: tuple[Decision, ...] = ()
    warnings: tuple[str, ...] = ()
    """Fallbacks and doubts that the report must show."""
    skipped_because: str | None = None


A = TypeVar("A", bound=StageArtifact)


class Produced(Frozen):
    """How a store entry came to be: when (UTC, ISO 8601) and how long it took."""

    started_at: str
    wall_s: float
    peak_rss_bytes: int


class Stored(Frozen, Generic[A]):
    """An artifact in the store. Only the key is identity; the rest is for reading."""

    kind: str
    key: str
    artifact: A = Field(exclude=True)
    directory: Path = Field(exclude=True)
    produced: Produced = Field(exclude=True)
    cached: bool = Field(exclude=True)


class StageInputs(Frozen):
    """Base of every `<Stage>Inputs`: only what the stage reads, never a measured value, path, time or run id."""

    fingerprint: str
    """Digest of device model, instruction set, cores, driver and library versions."""
