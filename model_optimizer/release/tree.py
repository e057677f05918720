"""Read a bundle below one directory descriptor, so that nothing outside of it is ever opened.

Links are followed nowhere. Of every file the bytes that are looked at are the very bytes that were hashed: a file that is
exchanged between check and use is one that was never checked, and what was checked is what is returned.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from model_optimizer.errors import IntegrityError
from model_optimizer.release.entry_names import path_fault

MAX_FILES = 10_000
_CHUNK_BYTES = 1 << 20
TAIL_BYTES = 22
"""Length of the record that ends a zip archive."""
_SPARSE_SLACK_BYTES = 64 << 20
_SPARSE_FACTOR = 8
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
Wanted = Callable[[str, int, bytes], int]
"""Given path, size and the first bytes of a file: how many bytes of its beginning are to be kept."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One plain file as its directory shows it."""

    path: str
    num_bytes: int
    allocated_bytes: int
    num_links: int
    inode: tuple[int, int]

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> Self:
        return cls(path, status.st_size, 512 * status.st_blocks, status.st_nlink, (status.st_dev, status.st_ino))

    @property
    def may_be_bomb(self) -> bool:
        """Return whether it claims many times what it occupies; zeros that a copy left out are no bomb.

        Some file systems of user space state no blocks at all, so that only a hole proves it.
        """
        return self.num_bytes > _SPARSE_SLACK_BYTES + _SPARSE_FACTOR * self.allocated_bytes


@dataclass(frozen=True, slots=True)
class Content:
    """What one reading of a file gave: its digest, and as much of its beginning as was wanted."""

    num_bytes: int
    sha256: str
    head: bytes
    tail: bytes
    """The last bytes, at most TAIL_BYTES."""


def keep_nothing(_path: str, _num_bytes: int, _first: bytes) -> int:
    return 0


class OpenTree:
    """A bundle's directory, held open; used as a context manager."""

    def __init__(self, directory: Path):
        self.name = directory.name
        self._path = directory
        self._handle = -1

    def __enter__(self) -> Self:
        try:
            self._handle = os.open(self._path, _DIRECTORY)
        except OSError as error:
            raise IntegrityError(f"{self._path}: missing: there is no such bundle directory") from error
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        os.close(self._handle)

    def entries(self) -> dict[str, Entry]:
        """Return every plain file by path, sorted.

        Raises:
            IntegrityError: anything else lies there, a name is unsafe, or there are too many.
        """
        found: dict[str, Entry] = {}
        self._walk(self._handle, "", found, [])
        return dict(sorted(found.items()))

    def _walk(self, folder: int, prefix: str, found: dict[str, Entry], folders: list[str]) -> None:
        names = sorted(os.listdir(folder))
        if len(found) + len(folders) + len(names) > MAX_FILES:
            raise IntegrityError(f"{self.name}: too many files: more than {MAX_FILES} with their folders")
        for name in names:
            path = prefix + name
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if fault := _kind_fault(status.st_mode) or _name_fault(path):
                raise IntegrityError(f"{self.name}/{_shown(path)}: {fault}")
            if stat.S_ISREG(status.st_mode):
                found[path] = Entry.of(path, status)
            else:
                folders.append(path)
                with self._opened(name, path, folder, _DIRECTORY) as inner:
                    self._walk(inner, f"{path}/", found, folders)

    def has_hole(self, path: str) -> bool:
        """Return whether a part of a file was never written; file systems that do not know say no."""
        with self._file(path) as handle:
            return os.lseek(handle, 0, os.SEEK_HOLE) < os.fstat(handle).st_size

    def read(self, path: str, wanted: Wanted = keep_nothing) -> Content:
        """Read one file from end to end, once.

        Raises:
            IntegrityError: it is gone, no plain file any more, or changes while it is read.
        """
        with self._file(path) as handle:
            before = os.fstat(handle)
            if fault := _kind_fault(before.st_mode):
                raise IntegrityError(f"{self.name}/{path}: {fault}")
            content = _read(handle, path, before.st_size, wanted)
            after = os.fstat(handle)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or content.num_bytes != before.st_size:
            raise IntegrityError(f"{self.name}/{path}: modified while it was read")
        return content

    def read_whole(self, path: str, limit_bytes: int) -> Content:
        """Read one small file and keep all of it.

        Raises:
            IntegrityError: as `read`, or it is larger than `limit_bytes`; then nothing was read.
        """
        with self._file(path) as handle:
            num_bytes = os.fstat(handle).st_size
        if num_bytes > limit_bytes:
            raise IntegrityError(f"{self.name}/{path}: too large: {num_bytes} bytes, at most {limit_bytes} are read")
        return self.read(path, lambda _path, _num_bytes, _first: limit_bytes)

    @contextmanager
    def _file(self, path: str) -> Iterator[int]:
        """Yield the descriptor of a file, each of its folders opened below the one before."""
        *folders, name = path.split("/")
        if folders:
            with self._folder(self._handle, folders, path) as folder, self._opened(name, path, folder, _FILE) as handle:
                yield handle
        else:
            with self._opened(name, path, self._handle, _FILE) as handle:
                yield handle

    @contextmanager
    def _folder(self, below: int, names: list[str], path: str) -> Iterator[int]:
        with self._opened(names[0], path, below, _DIRECTORY) as folder:
            if len(names) == 1:
                yield folder
            else:
                with self._folder(folder, names[1:], path) as inner:
                    yield inner

    @contextmanager
    def _opened(self, name: str, path: str, folder: int, how: int) -> Iterator[int]:
        try:
            handle = os.open(name, how, dir_fd=folder)
        except OSError as error:
            raise IntegrityError(f"{self.name}/{path}: exchanged: it was a plain file or folder a moment ago") from error
        try:
            yield handle
        finally:
            os.close(handle)


def _read(handle: int, path: str, num_bytes: int, wanted: Wanted) -> Content:
    digest, head, seen = hashlib.sha256(), bytearray(), 0
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, num_bytes + 1)))
    num_kept, tail = 0, b""
    while count := os.readv(handle, [buffer]):
        piece = buffer[:count]
        digest.update(piece)
        if seen == 0:
            num_kept = wanted(path, num_bytes, bytes(piece))
        if len(head) < num_kept:
            head += piece[: num_kept - len(head)]
        tail = (tail + bytes(piece[-TAIL_BYTES:]))[-TAIL_BYTES:]
        seen += count
        if seen > num_bytes:
            break  # it grows
    return Content(seen, digest.hexdigest(), bytes(head), tail)


def _kind_fault(mode: int) -> str | None:
    if stat.S_ISLNK(mode):
        return "symlink: a bundle holds only plain files"
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return "special file: a bundle holds only plain files"
    return None


def _name_fault(path: str) -> str | None:
    fault = path_fault(path)
    return None if fault is None else f"unsafe path: {fault}"


def _shown(path: str) -> str:
    """Return a path as one line can show it."""
    return path if path.isprintable() else ascii(path)
