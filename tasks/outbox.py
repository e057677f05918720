"""Letters to MLflow on disk, in the order in which they were written, until they are sent.

Every process that works in the folder may send them; who sends holds `turn`, so that one letter is never in two
hands. A letter is marked before it is sent the first time: after a kill it is known that MLflow may have got some
of it.
"""

import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import filelock
from pydantic import ValidationError

from tasks.letters import Letter

log = logging.getLogger(__name__)

TRIED = ".tried"


@dataclass
class Outbox:
    """The folder `spool`; `aside` in it holds what cannot be read or sent."""

    root: Path
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _full: bool = False

    @property
    def folder(self) -> Path:
        return self.root / "spool"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the sender's lock: SQLite has one writer, and a record is looked for before it is made."""
        lock = filelock.FileLock(self.root / "mlflow.lock")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError:  # a folder that cannot take a lock holds no letter either
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def keep(self, letter: Letter) -> bool:
        """Write a letter; return False where the disk cannot take it, which is said once.

        It survives the end of every process, not that of the machine: waiting for the disk would cost more than all else here.
        """
        name = f"{time.time_ns()}-{os.getpid()}-{next(self._numbers):05}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f".{name}"
            partial.write_text(letter.model_dump_json(), encoding="utf-8")
            partial.rename(self.folder / name)
        except OSError as error:
            if not self._full:
                log.warning("records for MLflow cannot be kept on disk and are sent from memory alone: %s", error)
            self._full = True
            return False
        return True

    def waiting(self) -> list[Path]:
        """Return the letters that are not sent, oldest first."""
        found = self.folder.glob("*.json") if self.folder.is_dir() else ()
        return sorted((path for path in found if not path.name.startswith(".")), key=_order)

    def read(self, path: Path) -> Letter | None:
        """Return a letter; one that is damaged is put aside and said, one that another process sent is None as well."""
        try:
            return Letter.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            self.put_aside(path, f"cannot be read ({type(error).__name__})")
            return None

    def mark(self, path: Path) -> Path:
        """Say that a letter is about to be sent; return its name from now on."""
        if is_tried(path):
            return path
        marked = path.with_suffix(f"{TRIED}.json")
        path.rename(marked)
        return marked

    def put_aside(self, path: Path, why: str) -> None:
        """Move a letter where it no longer stands in the way, and say it in one line."""
        target = self.folder / "aside" / path.name
        try:
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
        except OSError:
            path.unlink(missing_ok=True)
        log.warning("a record for MLflow %s and is put aside: %s", why, target)


def is_tried(path: Path) -> bool:
    """Return whether MLflow may have got some of this letter."""
    return path.name.endswith(f"{TRIED}.json")


def _order(path: Path) -> tuple[int, str]:
    """Letters of one process are numbered; between processes the clock decides."""
    moment = path.name.partition("-")[0]
    return (int(moment) if moment.isdigit() else 0, path.name)
