"""A folder that one process writes at a time: the second one is told who has it, and a dead one has nothing.

The claim is a lock of the kernel on a file beside the folder, so it ends with its holder, however that ends.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from model_optimizer.errors import ConfigError


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Have `folder`, which need not exist, for the body.

    Raises:
        ConfigError: another process has it; names its number and since when.
    """
    path = folder.absolute().with_name(f".{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(path)
    if descriptor is None:
        raise ConfigError(f"{folder} is being written by {_holder(path)}; wait for it, or name another folder")
    try:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "since": since}).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of the file that lies at `path`, or None where another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # its last holder removed it in between


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        held = json.loads(path.read_bytes())
        return f"process {held['pid']} since {held['since'][:16].replace('T', ' ')} UTC"
    except (OSError, ValueError, KeyError):  # just taken, or just given back
        return "another process"
