"""A soak in a process of its own: a crash of the engine is a finding, not the end of the one who looks.

The process runs on over the hours, because memory can be compared within one process only. It tells its owner after every
segment how far it is, and ends with it. One that ends by itself is written down and started again, a few times.
"""

import logging
import multiprocessing.process
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from model_optimizer.errors import ModelOptimizerError, UnsupportedError
from model_optimizer.journal import Journal
from model_optimizer.protocols import Quiet
from model_optimizer.verification.config import SoakConfig
from model_optimizer.verification.soak import Setting, Stress, run_soak, stood_for_s
from model_optimizer.verification.soak_records import Segment
from model_optimizer.verification.soak_twin import Opener, StartMethod, Twin, process_context

log = logging.getLogger(__name__)

MAX_CRASHES = 3
STOP_FILE = "STOP"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Stops:
    """When a soak gives up before its time."""

    folder: Path
    """A file `STOP` in it ends the soak after the running segment."""
    deadline_unix_s: float
    min_free_memory_bytes: int = GIB // 2
    min_free_disk_bytes: int = GIB

    def reason(self) -> str:
        """Return why to stop now, or nothing."""
        if (self.folder / STOP_FILE).exists():
            return f"{STOP_FILE} lies in its folder"
        if time.time() > self.deadline_unix_s:
            return "its deadline passed"
        if (free := psutil.virtual_memory().available) < self.min_free_memory_bytes:
            return f"the machine has {free / GIB:.2f} GiB of memory left, less than {self.min_free_memory_bytes / GIB:.2f}"
        if (free := shutil.disk_usage(self.folder).free) < self.min_free_disk_bytes:
            return f"the disk has {free / GIB:.2f} GiB left, less than {self.min_free_disk_bytes / GIB:.2f}"
        return ""


@dataclass(frozen=True, slots=True)
class SoakJob:
    """Everything that the process needs; crosses to it."""

    opener: Opener
    stress: Stress
    config: SoakConfig
    journal: Path
    key: str
    stops: Stops
    with_control: bool = True
    start_method: StartMethod = "spawn"

    def opened_journal(self) -> Journal[Segment]:
        return Journal(self.journal, self.key, Segment)


class SoakWorker:
    """`with SoakWorker(job) as worker: worker.run_until(3600)`."""

    def __init__(self, job: SoakJob, *, target: Callable[[SoakJob, Connection], None] | None = None):
        """`target` is what the process runs, `soak_in_process` unless a caller breaks it on purpose."""
        self._job = job
        self._target = target or soak_in_process
        self._context = process_context(job.start_method)
        self._num_crashes = 0
        self._process: multiprocessing.process.BaseProcess | None = None
        self._ours: Connection | None = None
        self.stood_for_s = stood_for_s(job.opened_journal().records)
        self.stopped_because = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._ours is not None:
            self._ours.close()
        if self._process is not None:
            self._process.join()

    def run_until(self, target_s: float, told: Callable[[float], None] = lambda _: None) -> float:
        """Soak until `target_s` seconds of traffic have been tested, or a reason to stop came; return how far it is.

        `told` hears of every segment. Raises:
            UnsupportedError: the engine cannot be opened here.
        """
        while self.stood_for_s < target_s and not self.stopped_because:
            message = self._next_message()
            if message is None:
                self._note_crash()
            elif message[0] == "refused":
                raise UnsupportedError(str(message[1]))
            elif message[0] == "stopped":
                self.stopped_because = str(message[1])
            else:
                self.stood_for_s = float(message[1])
                told(self.stood_for_s)
        return self.stood_for_s

    def _next_message(self) -> tuple[str, str | float] | None:
        """Return what the process says next; None where it ended without a word."""
        if self._process is None or self._ours is None:
            self._ours, theirs = self._context.Pipe()
            self._process = self._context.Process(target=self._target, args=(self._job, theirs), name="soak")
            self._process.start()
            theirs.close()
        try:
            kind, value = self._ours.recv()
        except (EOFError, ConnectionError):
            return None
        return str(kind), value

    def _note_crash(self) -> None:
        """Write down how the process ended; after a few times, give up."""
        assert self._process is not None
        self._process.join()
        how = ended_how(self._process.exitcode)
        self._process = self._ours = None
        journal = self._job.opened_journal()
        session = journal.records[-1].session + 1 if journal.records else 0
        journal.append(Segment.crashed(session, how, time.time()))
        log.warning("the soaked process ended by itself: %s", how)
        self._num_crashes += 1
        if self._num_crashes >= MAX_CRASHES:
            self.stopped_because = f"its process ended by itself {self._num_crashes} times, last: {how}"


def ended_how(exit_code: int | None) -> str:
    """Return how a process ended, in words."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    return f"exit code {exit_code}"


def soak_in_process(job: SoakJob, owner: Connection) -> None:
    """Open the engine and soak to the end of the job; tell the owner after every segment."""
    try:
        runtime = job.opener()
    except ModelOptimizerError as error:
        owner.send(("refused", str(error)))
        return
    journal = job.opened_journal()
    canaries = job.stress.canaries()
    twin = Twin(job.opener, canaries, start_method=job.start_method) if job.with_control else nullcontext(None)
    with twin as control:
        teller = _Teller(owner, job.stops)
        setting = Setting(control=control, stop=teller.after_segment)
        teller.setting = setting
        try:
            found = run_soak(runtime, job.stress, job.config, journal, Quiet(), setting=setting)
            if found.stopped_because:
                owner.send(("stopped", found.stopped_because))
        except BrokenPipeError:
            return  # the owner ended; the journal holds what was tested
        finally:
            runtime.close()


@dataclass(slots=True)
class _Teller:
    """Tells the owner how far the soak is, and asks whether to stop."""

    owner: Connection
    stops: Stops
    setting: Setting | None = None

    def after_segment(self) -> str:
        assert self.setting is not None
        self.owner.send(("stood for", self.setting.clock.hours * 3600))
        return self.stops.reason()
