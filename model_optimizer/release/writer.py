"""Write a bundle's files and know their digests at once: what is written is hashed on its way, never read again."""

import hashlib
import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path

from model_optimizer.artifacts.base import FileRef

_CHUNK_BYTES = 2 << 20
_NUM_BUFFERS = 6
"""One is read into and written; the others wait to be hashed, so that neither thread waits for the other at every piece."""
_NUM_PUMPS = 2
"""Files copied at once: a sha256 goes through one file after the other, about as fast as a fast disk takes one."""


class BundleWriter:
    """The one way into a bundle's directory. Of two files for one place the later stands."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: dict[str, FileRef] = {}

    @property
    def files(self) -> tuple[FileRef, ...]:
        """Return what was written so far, sorted by path."""
        return tuple(ref for _, ref in sorted(self._files.items()))

    def write(self, place: str, content: bytes) -> None:
        """Write one file from memory; a script is executable."""
        with self._create(place) as stream:
            _write_all(stream, memoryview(content))
        self._files[place] = FileRef(path=place, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    def copy(self, sources: Mapping[str, Path]) -> None:
        """Copy files to their places, the largest first and two at once; beside each a second thread hashes what is written."""
        waiting = sorted(sources.items(), key=lambda item: item[1].stat().st_size)
        with ThreadPoolExecutor(_NUM_PUMPS) as pumps:
            for done in [pumps.submit(self._copy_from, waiting) for _ in range(min(_NUM_PUMPS, len(waiting)))]:
                done.result()

    def _copy_from(self, waiting: list[tuple[str, Path]]) -> None:
        """Take the largest file that waits until none does."""
        pump = _Pump()
        with pump.hasher:
            while True:
                try:
                    place, source = waiting.pop()
                except IndexError:
                    return
                with source.open("rb", buffering=0) as reader, self._create(place) as stream:
                    num_bytes, sha256 = pump.move(reader, stream)
                self._files[place] = FileRef(path=place, num_bytes=num_bytes, sha256=sha256)

    def _create(self, place: str) -> FileIO:
        path = self.directory / place
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("wb", buffering=0)
        os.fchmod(stream.fileno(), 0o755 if path.suffix == ".sh" else 0o644)
        return stream


class _Pump:
    """Buffers and the thread that hashes them in order."""

    def __init__(self) -> None:
        self.hasher = ThreadPoolExecutor(1)
        self._buffers = [memoryview(bytearray(_CHUNK_BYTES)) for _ in range(_NUM_BUFFERS)]

    def move(self, reader: FileIO, stream: FileIO) -> tuple[int, str]:
        """Copy one file to its end; return its size and digest."""
        digest, num_bytes, turn = hashlib.sha256(), 0, 0
        hashing: list[Future[None] | None] = [None] * _NUM_BUFFERS
        while True:
            if (busy := hashing[turn]) is not None:
                busy.result()
            if not (count := reader.readinto(self._buffers[turn])):
                break
            piece = self._buffers[turn][:count]
            hashing[turn] = self.hasher.submit(digest.update, piece)
            _write_all(stream, piece)
            _begin_writeback(stream, num_bytes, count)
            num_bytes += count
            turn = (turn + 1) % _NUM_BUFFERS
        for busy in hashing:
            if busy is not None:
                busy.result()
        return num_bytes, digest.hexdigest()


def files_below(place: str, folder: Path) -> dict[str, Path]:
    """Return every file below a folder by the place that it has below `place`."""
    return {f"{place}/{path.relative_to(folder).as_posix()}": path for path in sorted(folder.rglob("*")) if path.is_file()}


def _write_all(stream: FileIO, piece: memoryview) -> None:
    """Write a whole piece; a write without buffer may take only a part of it."""
    while piece:
        piece = piece[stream.write(piece) :]


def _begin_writeback(stream: FileIO, start: int, num_bytes: int) -> None:
    """Let the disk begin with what was just written, so that it works while we hash and the final fsync finds little left.

    Source: Linux, mm/fadvise.c: POSIX_FADV_DONTNEED starts writing dirty pages and keeps them.
    """
    if sys.platform == "linux":
        os.posix_fadvise(stream.fileno(), start, num_bytes, os.POSIX_FADV_DONTNEED)
