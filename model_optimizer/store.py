"""Content-addressed stage results: `<root>/<kind>/<key>/` holds an artifact and its files.

`artifact.json` is written last (temporary file, fsync, rename), so its presence means done. Every hit
verifies size and sha256 of every file; what does not match is made again. A maker works inside the
entry's own directory, so whatever journal it left there before a kill is found again. Two processes on
one key: one works, the other waits.
"""

import hashlib
import json
import logging
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import filelock
from pydantic import BaseModel, ValidationError

from model_optimizer.artifacts.base import FileRef, Produced, StageArtifact, StageInputs, Stored, file_sha256
from model_optimizer.code_version import code_version
from model_optimizer.disk import explained
from model_optimizer.errors import StorageError

log = logging.getLogger(__name__)

A = TypeVar("A", bound=StageArtifact)
ARTIFACT = "artifact.json"
PARTIAL = ".partial"
"""Ends the name of a file that `write_atomically` has not finished; kill -9 leaves it behind."""


def canonical_json(value: BaseModel | Mapping[str, object]) -> bytes:
    """Return the one JSON form of a value: sorted keys, no spaces, UTF-8."""
    data = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def stage_key(inputs: StageInputs) -> str:
    """Return the sha256 that names the result of `inputs`: their content and the code that reads them."""
    package = type(inputs).__module__.split(".")[1]
    identity = {"inputs": inputs.model_dump(mode="json"), "type": type(inputs).__qualname__, "code": code_version(package)}
    return hashlib.sha256(canonical_json(identity)).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part; durable on return.

    Raises:
        StorageError: the disk is full or the folder cannot be written; the old content stands.
    """
    with explained(path.parent):
        _write_and_rename(path, content)


def _write_and_rename(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def file_refs(directory: Path, *paths: Path) -> tuple[FileRef, ...]:
    """Return references to the given files, folders included with all that they hold, sorted."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return tuple(FileRef.of(directory, file) for file in sorted(files))


def lock_path(directory: Path) -> Path:
    """Return the lock of a store entry; whoever makes or removes the entry holds it."""
    return directory.with_suffix(".lock")


class Store:
    """The only truth about finished work."""

    def __init__(self, root: Path):
        self.root = root
        self._verified: set[tuple[str, str]] = set()

    def directory(self, kind: str, key: str) -> Path:
        return self.root / kind / key

    def find(self, kind: str, key: str, artifact_type: type[A]) -> Stored[A] | None:
        """Return the finished, intact entry, or None; a hit stamps its artifact.json, by which gc knows when it was last used.

        Raises:
            StorageError: the store is no folder.
        """
        directory = self.directory(kind, key)
        try:
            envelope = json.loads((directory / ARTIFACT).read_bytes())
            artifact = artifact_type.model_validate_json(json.dumps(envelope["artifact"]))
            produced = Produced.model_validate(envelope["produced"])
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise StorageError(f"{self.root} or a part of its path is a file; move it away or work in another folder") from error
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            log.warning("store entry %s/%s is unreadable and will be made again: %s", kind, key[:12], error)
            return None
        if (kind, key) not in self._verified:
            for ref in artifact.files:
                if fault := _fault(directory, ref):
                    log.warning("store entry %s/%s: %s; it will be made again", kind, key[:12], fault)
                    return None
            self._verified.add((kind, key))
        if not _stamp(directory / ARTIFACT):
            return None
        return Stored[A](kind=kind, key=key, artifact=artifact, directory=directory, produced=produced, cached=True)

    def produce(
        self, kind: str, key: str, artifact_type: type[A], make: Callable[[Path], A], *, refresh: bool = False
    ) -> Stored[A]:
        """Return the entry of `key`, calling `make(directory)` only where no intact one exists.

        `refresh` makes it again even so. `make` may find a journal that an earlier, killed call left.

        Raises:
            StorageError: the disk is full or cannot be written, wherever in `make` that shows; the entry does not count as done.
        """
        with explained(self.root):
            return self._produce(kind, key, artifact_type, make, refresh=refresh)

    def _produce(self, kind: str, key: str, artifact_type: type[A], make: Callable[[Path], A], *, refresh: bool) -> Stored[A]:
        directory = self.directory(kind, key)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lock_path(directory)):
            if not refresh and (found := self.find(kind, key, artifact_type)):
                return found
            if (directory / ARTIFACT).exists():  # finished once, now corrupt or to be refreshed
                shutil.rmtree(directory)
            directory.mkdir(exist_ok=True)
            for leftover in directory.rglob(f".*{PARTIAL}"):  # would be listed among the folder's files
                leftover.unlink()
            started_at, start = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
            artifact = make(directory)
            produced = Produced(started_at=started_at, wall_s=time.monotonic() - start, peak_rss_bytes=peak_rss_bytes())
            envelope = {"artifact": artifact.model_dump(mode="json"), "produced": produced.model_dump(mode="json")}
            write_atomically(directory / ARTIFACT, json.dumps(envelope, indent=1, ensure_ascii=False).encode())
            self._verified.add((kind, key))
        return Stored[A](kind=kind, key=key, artifact=artifact, directory=directory, produced=produced, cached=False)


def peak_rss_bytes() -> int:
    """Return the peak resident size of this process and of its largest finished child, in bytes."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _stamp(artifact: Path) -> bool:
    """Note that an entry is used now; return False where it was removed since it was read."""
    try:
        os.utime(artifact)
    except FileNotFoundError:
        return False
    except OSError as error:  # a store that cannot be written still serves what it holds
        log.debug("%s keeps its old stamp: %s", artifact, error)
    return True


def _fault(directory: Path, ref: FileRef) -> str | None:
    """Return what is wrong with a stored file, or None."""
    path = directory / ref.path
    if not path.is_file():
        return f"{ref.path} is missing"
    if path.stat().st_size != ref.num_bytes:
        return f"{ref.path} has {path.stat().st_size} bytes, not {ref.num_bytes}"
    return None if file_sha256(path) == ref.sha256 else f"{ref.path} has changed"
