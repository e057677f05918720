"""The control arm: a twin process that opens the same engine and runs nothing but the reference workload.

What grows there as well is not the load's doing, and what becomes slow there as well is the machine.
"""

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import UnsupportedError
from model_optimizer.measurement.process import quiesced_counters
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, Runtime
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.verification.soak_records import ControlReading
from model_optimizer.verification.soak_reference import run_reference

StartMethod = Literal["spawn", "fork"]
"""`fork` only from a process that has no threads."""
NUM_REPEATS = 3
"""Of the reference workload at each reading; the fastest counts for time, all of them for the hash."""
START_S = 600.0


@dataclass(frozen=True, slots=True)
class Opener:
    """Opens one engine; crosses to another process."""

    engine: Engine
    directory: Path
    kv: KvPlan

    def __call__(self) -> LogitsRuntime:
        return RUNTIMES.get(self.engine.runtime).open(self.engine, self.directory, self.kv)


class Twin:
    """`with Twin(open_runtime, canaries) as twin: twin.read()`; it ends with its owner, however that ends."""

    def __init__(
        self,
        open_runtime: Callable[[], Runtime],
        requests: Sequence[GenerationRequest],
        *,
        start_method: StartMethod = "spawn",
    ):
        context = process_context(start_method)
        self._ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._ours, open_runtime, tuple(requests)), name="soak-control"
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ours.close()
        self._process.join()

    def read(self) -> ControlReading:
        """Run the reference workload in the twin and return what it holds afterwards.

        Raises:
            UnsupportedError: the twin ended, or gave no answer within `START_S` seconds.
        """
        try:
            self._ours.send("read")
            if not self._ours.poll(START_S):
                raise EOFError
            reading = self._ours.recv()
        except (EOFError, ConnectionError) as error:
            raise UnsupportedError(
                "the soak's control process ended or does not answer, perhaps for want of memory; soak without it (--no-control)"
            ) from error
        assert isinstance(reading, ControlReading)
        return reading


def process_context(start_method: StartMethod) -> SpawnContext | ForkContext:
    """Return how processes are started."""
    return multiprocessing.get_context("spawn") if start_method == "spawn" else multiprocessing.get_context("fork")


def read_control(runtime: Runtime, requests: Sequence[GenerationRequest]) -> ControlReading:
    """Return one reading of the control arm."""
    runs = [run_reference(runtime, requests) for _ in range(NUM_REPEATS)]
    return ControlReading(
        digest=runs[-1].digest,
        wall_s=min(run.wall_s for run in runs),
        cpu_s=min(run.cpu_s for run in runs),
        counters=quiesced_counters(),
    )


def _serve(
    connection: Connection, other_end: Connection, open_runtime: Callable[[], Runtime], requests: tuple[GenerationRequest, ...]
) -> None:
    """Answer until the owner closes its end, or dies and thereby closes it."""
    other_end.close()
    runtime = open_runtime()
    gc.collect()
    gc.freeze()
    try:
        while True:
            connection.recv()
            connection.send(read_control(runtime, requests))
    except (EOFError, ConnectionError):
        return
