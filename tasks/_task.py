"""Our one task decorator: a Prefect name, cache and retry for a plain engine function.

A stage task returns a receipt (kind and key), never data: the store is the only truth. Prefect's own
cache is keyed by the stage key and refreshed when the store no longer holds the entry, so Retry in the
UI and a fresh run both skip what is finished, and a deleted entry is made again.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from prefect import State, Task, task
from prefect.client.schemas.objects import TaskRun
from prefect.context import TaskRunContext

from model_optimizer.artifacts.base import Produced, Stage, StageArtifact, StageInputs, Stored
from model_optimizer.errors import MeasurementUnstable
from model_optimizer.protocols import Progress
from model_optimizer.store import Store, stage_key

log = logging.getLogger(__name__)

I = TypeVar("I", bound=StageInputs)  # noqa: E741
A = TypeVar("A", bound=StageArtifact)


@dataclass(frozen=True)
class Workplace:
    """Where a run keeps its things, and how it tells its progress."""

    root: Path
    store: Store
    progress: Progress
    refresh: Stage | None = None
    """Results of this stage and of all after it count only if they were made by this run."""
    started_at: datetime = datetime.min.replace(tzinfo=UTC)
    """When this run started for the first time."""
    slot: Callable[[], AbstractContextManager[None]] = nullcontext
    """Held while a stage is made: a turn on the device that runs share. Taken before the entry's lock and never inside one."""

    @property
    def bundles(self) -> Path:
        return self.root / "bundles"

    def is_stale(self, stage: Stage, produced: Produced) -> bool:
        """Return whether a stored result is to be made again because the user asked for a refresh."""
        order = list(Stage)
        if self.refresh is None or order.index(stage) < order.index(self.refresh):
            return False
        return datetime.fromisoformat(produced.started_at) < self.started_at.replace(microsecond=0)


class _Call(Generic[I]):
    """The arguments of one compute step, in a plain object.

    Prefect looks for futures in every argument, through dataclasses, models and lists to the last leaf, thrice a step; for
    a stage's inputs that was two fifths of what a step cost (`benchmarks/orchestration.py`). It leaves a plain object alone.
    """

    __slots__ = ("inputs", "place", "refresh")

    def __init__(self, inputs: I, place: Workplace, *, refresh: bool):
        self.inputs = inputs
        self.place = place
        self.refresh = refresh


class StageTask(Generic[I, A]):
    """One stage as Prefect sees it; call it like a function."""

    def __init__(
        self,
        stage: Stage,
        artifact_type: type[A],
        function: Callable[[I, Path, Workplace], A],
        fault: Callable[[A, I, Workplace], str | None],
    ):
        self.stage = stage
        self.artifact_type = artifact_type
        self.function = function
        """The plain engine call, without Prefect or store."""
        self._fault = fault
        as_task = task(
            name=stage.value,
            cache_key_fn=_key_of_inputs,
            persist_result=True,
            result_serializer="json",
            retries=1,
            retry_condition_fn=_can_heal,
        )
        self.compute = as_task(self._compute)

    def __call__(self, inputs: I, place: Workplace, role: str | None = None) -> Stored[A]:
        """Return the stage's result, from the store where it is held; `role` tells calls of one stage apart in the UI."""
        compute = self.compute.with_options(task_run_name=f"{self.stage}-{role}") if role else self.compute
        key = stage_key(inputs)
        held = place.store.find(self.stage, key, self.artifact_type)
        fault = self._redo_because(held, inputs, place) if held else None
        if fault:
            log.warning("%s is made again: %s", self.stage, fault)
        elif held:
            compute(_Call(inputs, place, refresh=False))
            return held
        with place.slot():
            receipt = compute.with_options(refresh_cache=True)(_Call(inputs, place, refresh=fault is not None))
        stored = place.store.find(self.stage, key, self.artifact_type)
        assert stored is not None, f"{self.stage} {key} was made and is not in the store"
        return stored.model_copy(update={"cached": receipt["cached"]})

    def _redo_because(self, held: Stored[A], inputs: I, place: Workplace) -> str | None:
        """Return why a stored result does not count in this run, or None."""
        if place.is_stale(self.stage, held.produced):
            return f"{place.refresh} and what follows was asked to be made anew"
        return self._fault(held.artifact, inputs, place)

    def _compute(self, call: _Call[I]) -> dict[str, str | bool]:
        """Make the entry, or wait for another run that is making it; without `refresh` what that run made is taken."""
        inputs, place = call.inputs, call.place
        stored = place.store.produce(
            self.stage,
            stage_key(inputs),
            self.artifact_type,
            lambda workspace: self.function(inputs, workspace, place),
            refresh=call.refresh,
        )
        return {"kind": self.stage.value, "key": stored.key, "cached": stored.cached}


def stage_task(
    stage: Stage, artifact_type: type[A], *, fault: Callable[[A, I, Workplace], str | None] | None = None
) -> Callable[[Callable[[I, Path, Workplace], A]], StageTask[I, A]]:
    """Return the decorator that turns `function(inputs, workspace, place)` into a `StageTask`.

    `fault` says why a stored result no longer stands although its own files are intact.
    """

    def decorate(function: Callable[[I, Path, Workplace], A]) -> StageTask[I, A]:
        return StageTask(stage, artifact_type, function, fault or _no_fault)

    return decorate


def _no_fault(_artifact: StageArtifact, _inputs: StageInputs, _place: Workplace) -> None:
    return None


def _key_of_inputs(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
    call = parameters["call"]
    assert isinstance(call, _Call)
    return stage_key(call.inputs)


def _can_heal(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Retry a measurement that did not become stable, and nothing else."""
    return isinstance(state.result(raise_on_failure=False), MeasurementUnstable)
