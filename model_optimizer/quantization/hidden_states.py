"""Hidden states between two decoder blocks, on disk in two files that take turns: the journal of a walk.

Where a GPU has room for them they stay there instead; a killed walk then goes through its blocks again.

States entering block n lie in file n mod 2, so that a kill inside block n leaves what block n reads. Each sequence is
read and written by itself; memory holds one. Bytes are float32 in the machine's order, sequence after sequence.

Shape letters: T tokens of one sequence, D hidden features.
"""

import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from pydantic import BaseModel, ValidationError

from model_optimizer.disk import explained
from model_optimizer.models.shards import as_bytes
from model_optimizer.store import write_atomically

log = logging.getLogger(__name__)


class _Mark(BaseModel):
    """What the journal says: the next block, and the checksum of the states that enter it in every stream."""

    next_block: int
    checksums: dict[str, int]


class States(Protocol):
    """One stream of hidden states, e.g. those of the full model or of its quantized prefix."""

    @property
    def stream(self) -> str: ...
    def begin(self, entering: Path) -> None:
        """Take a file of states, sequence after sequence, for what enters block 0."""

    def read(self, block: int) -> Iterator[torch.Tensor]:
        """Yield the states [1, T, D] that enter a block, sequence by sequence."""

    def writing(self, block: int) -> AbstractContextManager["Writer"]:
        """Give a writer of the states that enter a block."""

    def checksum(self, block: int) -> int | None:
        """Return what a journal may hold against the states that enter a block; None where they do not outlive the process."""

    def remove(self) -> None:
        """Forget them."""


class Writer(Protocol):
    """Takes one sequence after another."""

    @property
    def checksum(self) -> int: ...
    def write(self, hidden: torch.Tensor) -> None:
        """Append the states [1, T, D] of the next sequence."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """One stream on disk, e.g. those of the full model or of its quantized prefix."""

    directory: Path
    stream: str
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    width: int

    def path(self, block: int) -> Path:
        """Return the file of the states that enter a block."""
        return self.directory / f"{self.stream}-{block % 2}.bin"

    def begin(self, entering: Path) -> None:
        """Let the states of a file enter block 0."""
        shutil.copyfile(entering, self.path(0))

    def read(self, block: int) -> Iterator[torch.Tensor]:
        """Yield the states [1, T, D] that enter a block, sequence by sequence."""
        with self.path(block).open("rb") as stream:
            for length in self.lengths:
                flat = np.fromfile(stream, dtype=np.float32, count=length * self.width)
                yield torch.from_numpy(flat).reshape(1, length, self.width)

    @contextmanager
    def writing(self, block: int) -> Iterator["StateWriter"]:
        """Give a writer of the states that enter a block; they are durable when the body ends."""
        with explained(self.directory), self.path(block).open("wb") as stream:
            yield StateWriter(stream.fileno())
            os.fsync(stream.fileno())

    def checksum(self, block: int) -> int | None:
        """Return the CRC-32 of the file that enters a block; None where it is absent or has another size."""
        path, expected = self.path(block), 4 * self.width * sum(self.lengths)
        if not path.is_file() or path.stat().st_size != expected:
            return None
        value = 0
        with path.open("rb") as stream:
            while piece := stream.read(1 << 22):
                value = zlib.crc32(piece, value)
        return value

    def remove(self) -> None:
        """Delete both files."""
        for block in (0, 1):
            self.path(block).unlink(missing_ok=True)


@dataclass(slots=True)
class StateWriter:
    """Appends one sequence after another, and keeps the checksum of all."""

    descriptor: int
    checksum: int = 0

    def write(self, hidden: torch.Tensor) -> None:
        """Append the states [1, T, D] of the next sequence."""
        content = as_bytes(hidden.cpu())
        self.checksum = zlib.crc32(content, self.checksum)
        while len(content):
            content = content[os.write(self.descriptor, content) :]


@dataclass(slots=True)
class DeviceStates:
    """One stream in the memory of a device."""

    stream: str
    lengths: tuple[int, ...]
    width: int
    device: torch.device
    _kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def begin(self, entering: Path) -> None:
        """Load the states of a file, which enter block 0."""
        with entering.open("rb") as stream:
            flat = (np.fromfile(stream, dtype=np.float32, count=length * self.width) for length in self.lengths)
            self._kept[0] = [torch.from_numpy(it).reshape(1, -1, self.width).to(self.device) for it in flat]

    def read(self, block: int) -> Iterator[torch.Tensor]:
        """Yield the states [1, T, D] that enter a block, sequence by sequence."""
        yield from self._kept[block % 2]

    @contextmanager
    def writing(self, block: int) -> Iterator["DeviceWriter"]:
        """Give a writer of the states that enter a block."""
        writer = DeviceWriter()
        yield writer
        self._kept[block % 2] = writer.kept

    def checksum(self, block: int) -> int | None:
        """Return None: they end with the process."""
        return None

    def remove(self) -> None:
        """Free the memory."""
        self._kept.clear()


@dataclass(slots=True)
class DeviceWriter:
    """Keeps one sequence after another."""

    checksum: int = 0
    kept: list[torch.Tensor] = field(default_factory=list)

    def write(self, hidden: torch.Tensor) -> None:
        """Keep the states [1, T, D] of the next sequence."""
        self.kept.append(hidden)


class WalkJournal:
    """Which block comes next. Law: after `advance(n, ...)` returns, a new journal of the same path resumes at block n."""

    def __init__(self, path: Path):
        self.path = path

    def resume(self, streams: Sequence[States]) -> int | None:
        """Return the next block, or None where the walk must begin anew; damage is warned of."""
        if not self.path.is_file():
            return None
        try:
            mark = _Mark.model_validate_json(self.path.read_bytes())
        except ValidationError as error:
            log.warning("the journal %s is unreadable (%s); the walk starts again", self.path, error)
            return None
        found = {stream.stream: stream.checksum(mark.next_block) for stream in streams}
        if found != mark.checksums:
            log.warning("the hidden states beside %s are not what it says; the walk starts again", self.path)
            return None
        return mark.next_block

    def advance(self, next_block: int, checksums: dict[str, int]) -> None:
        """Record that all before `next_block` is done."""
        write_atomically(self.path, _Mark(next_block=next_block, checksums=checksums).model_dump_json().encode())

    def remove(self) -> None:
        """Forget the walk."""
        self.path.unlink(missing_ok=True)
