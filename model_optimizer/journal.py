"""An append-only journal of one long part: every record is on disk before the next one starts, so kill -9 loses at most one."""

import json
import logging
import os
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from model_optimizer.disk import explained

log = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)


class Journal(Generic[R]):
    """JSON lines: first `{"key": ...}`, then one record each; NaN and infinities are kept.

    Law: after `append(record)` returns, a new Journal of the same path and key holds `record`. What follows a torn or
    unreadable line is cut off. A journal of another key belongs to other inputs and is begun anew. Both are warned of.
    """

    def __init__(self, path: Path, key: str, record_type: type[R]):
        self.path = path
        self.records: list[R] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        header = _line({"key": key})
        if not lines or lines[0] != header:
            if lines:
                log.warning("journal %s was written for other inputs and is begun anew", path.name)
            self._write(header, "wb")
            return
        good = len(header)
        for line in lines[1:]:
            try:
                record = record_type.model_validate_json(line)
            except ValidationError:
                break
            if not line.endswith(b"\n"):
                break
            self.records.append(record)
            good += len(line)
        if good < path.stat().st_size:
            log.warning("journal %s ends in a torn line, which is dropped", path.name)
            os.truncate(path, good)

    def append(self, record: R) -> None:
        """Add a record; it is durable on return.

        Raises:
            StorageError: the disk is full; a half-written line is dropped when the journal is opened again.
        """
        self._write(_line(record.model_dump(mode="json")), "ab")
        self.records.append(record)

    def _write(self, content: bytes, mode: str) -> None:
        with explained(self.path.parent), self.path.open(mode) as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
