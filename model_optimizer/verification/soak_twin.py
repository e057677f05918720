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
from model_optimizer.measurement.process import Counters, quiesced_counters
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, Runtime
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.verification.soak_records import ControlRun
from model_optimizer.verification.soak_reference import run_reference

StartMethod = Literal["spawn", "fork"]
"""`fork` only from a process that has no threads."""
START_S = 600.0
RUN, COUNT = "run", "count"
"""What a twin is asked."""


@dataclass(frozen=True, slots=True)
class Opener:
    """Opens one engine; crosses to another process."""

    engine: Engine
    directory: Path
    kv: KvPlan

    def __call__(self) -> LogitsRuntime:
        return RUNTIMES.get(self.engine.runtime).open(self.engine, self.directory, self.kv)


class Twin:
    """`with Twin(open_runtime, canaries) as twin: twin.run()`; it ends with its owner, however that ends."""

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

    def run(self) -> ControlRun:
        """Run the reference workload once in the twin.

        Raises:
            UnsupportedError: the twin ended, or gave no answer within `START_S` seconds.
        """
        answer = self._ask(RUN)
        assert isinstance(answer, ControlRun)
        return answer

    def counters(self) -> Counters:
        """Return what the twin holds at rest; raises as `run` does."""
        answer = self._ask(COUNT)
        assert isinstance(answer, Counters)
        return answer

    def _ask(self, what: str) -> object:
        try:
            self._ours.send(what)
            if not self._ours.poll(START_S):
                raise EOFError
            return self._ours.recv()
        except (EOFError, ConnectionError) as error:
            raise UnsupportedError(
                "the soak's control process ended or does not answer, perhaps for want of memory; soak without it (--no-control)"
            ) from error


def process_context(start_method: StartMethod) -> SpawnContext | ForkContext:
    """Return how processes are started."""
    return multiprocessing.get_context("spawn") if start_method == "spawn" else multiprocessing.get_context("fork")


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
            if connection.recv() == COUNT:
                connection.send(quiesced_counters())
                continue
            found = run_reference(runtime, requests)
            connection.send(ControlRun(digest=found.digest, wall_s=found.wall_s, cpu_s=found.cpu_s))
    except (EOFError, ConnectionError):
        return
