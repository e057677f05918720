"""Room and permission to write, asked before work starts and explained when the disk says no.

Writers of other libraries tell of a full disk in their own words (a Rust error, a database error, a short write), so a failure
is read by its whole chain of causes and, where those are silent, by how much room is left.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from model_optimizer.errors import CompileError, ModelOptimizerError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.ENOTDIR)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.EEXIST)
"""A fault of the disk only where the file lies below the folder that is written: the same codes come from reading elsewhere."""
_FULL_WORDS = ("no space left on device", "disk is full", "os error 28", "disk quota exceeded")
_READ_ONLY_WORDS = ("read-only file system", "readonly database", "os error 30")
FULL_BELOW_BYTES = 64 * 1024
"""Less room than this, and a failure without a better reason is put down to it."""


def nearest_folder(path: Path) -> Path:
    """Return `path` or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists() or folder.is_symlink())


def free_bytes(path: Path) -> int:
    """Return the room where `path` lies or would lie."""
    return shutil.disk_usage(nearest_folder(path)).free


def require_writable(folder: Path, need_bytes: int = 0) -> None:
    """Refuse a folder that cannot be made or written, or that lacks room for `need_bytes`; nothing is written.

    Raises:
        StorageError: names what stands in the way.
    """
    nearest = nearest_folder(folder)
    if not nearest.is_dir():
        raise StorageError(f"{nearest} is a file where a folder must be; move it away or work in another folder")
    # a bit of permission is not enough: root may do everything except write to a read-only file system
    if os.statvfs(nearest).f_flag & os.ST_RDONLY or not os.access(nearest, os.W_OK | os.X_OK):
        raise StorageError(f"{nearest} cannot be written (read-only, or not yours); work in a folder that can")
    if (free := free_bytes(nearest)) < need_bytes:
        raise StorageError(
            f"{nearest} has {_mib(free)} MiB free, and at least {_mib(need_bytes)} MiB are needed; free space or work elsewhere"
        )


class explained:
    """Turn a failure to write below `folder` into a StorageError that names it; every other error passes unchanged."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        """Raise the better error, chained to the first; a compiler's own process tells of a full disk in a CompileError."""
        ours = isinstance(error, ModelOptimizerError) and not isinstance(error, CompileError)
        if isinstance(error, Exception) and not ours and (fault := storage_fault(error, self._folder)):
            raise fault from error


def storage_fault(error: BaseException, folder: Path) -> StorageError | None:
    """Return what `error` says about the disk of `folder`, or None where the disk is not to blame."""
    causes = tuple(_causes(error))
    codes = {cause.errno for cause in causes if isinstance(cause, OSError)}
    words = " ".join(str(cause).lower() for cause in causes)
    free = free_bytes(folder)
    if codes & {*_FULL} or any(phrase in words for phrase in _FULL_WORDS) or free < FULL_BELOW_BYTES:
        return StorageError(f"the disk of {folder} is full ({_mib(free)} MiB free); free space and run again, it continues there")
    barred = next((cause for cause in causes if isinstance(cause, OSError) and _bars_writing(cause, folder)), None)
    if barred or any(phrase in words for phrase in _READ_ONLY_WORDS):
        place, reason = (barred.filename, barred.strerror) if barred else (None, None)
        return StorageError(f"{place or folder} cannot be written ({reason or 'read-only'}); work in a folder that can")
    return None


def _bars_writing(error: OSError, folder: Path) -> bool:
    below = isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder)
    return error.errno in _READ_ONLY or (error.errno in _FORBIDDEN and below)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
