"""An append-only record of finished measurements, so that a killed scan continues where it stopped.

One JSON object per line, flushed and fsynced. A line cut off by the kill is dropped on reading and
overwritten by the next append.
"""

import json
import os
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from model_optimizer.artifacts.base import Frozen

R = TypeVar("R", bound=Frozen)


class Journal(Generic[R]):
    """Rows of one type in one file. Law: after `append(row)` returns, a new Journal on the path holds `row`."""

    def __init__(self, path: Path, row_type: type[R]):
        self._path = path
        self.rows: list[R] = []
        intact = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n"):
                break
            try:
                self.rows.append(row_type.model_validate_json(line))
            except ValidationError:
                break
            intact += len(line)
        if path.exists():
            os.truncate(path, intact)

    def append(self, row: R) -> None:
        """Write one row durably."""
        with self._path.open("ab") as stream:
            stream.write(json.dumps(row.model_dump(mode="json"), sort_keys=True).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.rows.append(row)
