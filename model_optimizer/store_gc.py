"""What the store holds, and the removal of what nobody has used for long. Bundles lie elsewhere and are never touched.

A run that starts meanwhile never breaks: an entry goes only while its lock is held, and `Store.find` stamps
`artifact.json` as its last act and takes an entry for absent where that file is gone. So gc renames
`artifact.json` first, looks at its stamp once more, and gives an entry back that was used in between. A
killed gc leaves an unfinished entry or a folder that the next gc clears; never one that looks finished.
"""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import filelock

from model_optimizer.disk import explained
from model_optimizer.store import ARTIFACT, lock_path

_DOOMED = f"{ARTIFACT}.gc"
_TRASH_SUFFIX = ".gc"

State = Literal["finished", "half-made", "left by a killed gc"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One directory of the store."""

    kind: str
    key: str
    directory: Path
    state: State
    num_bytes: int
    last_used: float
    """Seconds since the epoch: the last hit of a finished entry, the last write of a half-made one."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An old entry that was not removed, and why."""

    entry: Entry
    because: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What gc removed (or would remove) and which old entries it left."""

    removed: tuple[Entry, ...]
    kept: tuple[Kept, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.removed)


def entries(root: Path) -> Iterator[Entry]:
    """Yield every entry of the store at `root`, by kind and key; none where there is no store."""
    for directory in sorted(path for path in root.glob("*/*") if path.is_dir()):
        entry = _entry(directory)
        if entry is not None:
            yield entry


def collect(root: Path, unused_for_s: float, *, dry_run: bool = False) -> Collected:
    """Remove entries that were not used, and half-made ones that were not written, for `unused_for_s` seconds.

    Raises:
        StorageError: the store cannot be written.
    """
    cutoff = time.time() - unused_for_s
    removed: list[Entry] = []
    kept: list[Kept] = []
    with explained(root):
        for entry in entries(root):
            if entry.state != "left by a killed gc" and entry.last_used >= cutoff:
                continue
            because = _probe(entry) if dry_run else _remove(entry, cutoff)
            if because is None:
                removed.append(entry)
            else:
                kept.append(Kept(entry, because))
    return Collected(tuple(removed), tuple(kept))


def _entry(directory: Path) -> Entry | None:
    """Look at one directory; None where it went away meanwhile."""
    try:
        files = [path.stat() for path in directory.rglob("*") if path.is_file()]
        own = directory.stat().st_mtime
        stamp = (directory / ARTIFACT).stat().st_mtime if (directory / ARTIFACT).is_file() else None
    except FileNotFoundError:
        return None
    state: State = "half-made" if stamp is None else "finished"
    if directory.suffix == _TRASH_SUFFIX:
        state = "left by a killed gc"
    newest = max((own, *(file.st_mtime for file in files)))
    num_bytes = sum(file.st_size for file in files)
    return Entry(directory.parent.name, directory.name, directory, state, num_bytes, newest if stamp is None else stamp)


def _probe(entry: Entry) -> str | None:
    """Return why an entry could not be removed now, or None."""
    if not lock_path(entry.directory).exists():
        return None
    try:
        with filelock.FileLock(lock_path(entry.directory), blocking=False):
            return None
    except filelock.Timeout:
        return _BUSY


def _remove(entry: Entry, cutoff: float) -> str | None:
    """Remove an entry under its lock; return why not, or None."""
    try:
        with filelock.FileLock(lock_path(entry.directory), blocking=False):
            return _remove_locked(entry, cutoff)
    except filelock.Timeout:
        return _BUSY


_BUSY = "a run is working on it"


def _remove_locked(entry: Entry, cutoff: float) -> str | None:
    directory = entry.directory
    if entry.state == "left by a killed gc":
        shutil.rmtree(directory)
        return None
    artifact, doomed = directory / ARTIFACT, directory / _DOOMED
    if not artifact.exists() and entry.state == "finished":
        return "it changed meanwhile"
    if artifact.exists():
        os.replace(artifact, doomed)
        if doomed.stat().st_mtime >= cutoff:
            os.replace(doomed, artifact)
            return "it was used meanwhile"
    elif (now := _entry(directory)) is None or now.last_used >= cutoff:
        return "it was worked on meanwhile"
    trash = directory.with_name(directory.name + _TRASH_SUFFIX)
    if trash.exists():
        shutil.rmtree(trash)
    directory.rename(trash)
    shutil.rmtree(trash)
    return None
