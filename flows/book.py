"""The run's book: every finished stage is recorded in MLflow and Prefect, and the run ends early where the user said so."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from model_optimizer.artifacts.base import Stage
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.strategy import Strategy
from tasks.record import AnyStored, Round, RunIdentity, record_stage
from tasks.tracking import Tracker


class StoppedEarly(Exception):
    """The stage that the run was to end with is finished."""


@dataclass
class Book:
    """Records stages of one run; `until` is the last one that is wanted."""

    tracker: Tracker
    run: RunIdentity
    until: Stage | None
    cached: dict[str, bool] = field(default_factory=dict)
    """Stage -> whether its (last) result was in the store already."""
    tested: Strategy | None = None
    """The candidate that is on the line since it was compiled."""

    def enter(self, stage: Stage, results: Mapping[str, AnyStored], *, round_number: int = 0) -> None:
        """Record a stage's results by role, the first of which is the stage's own."""
        first = next(iter(results.values()))
        if isinstance(first.artifact, CompiledModel):
            self.tested = first.artifact.strategy
        record_stage(stage, results, self.tracker, self.run, Round(round_number, self._candidate(stage)))
        self.cached[stage.value] = first.cached

    def close(self, stage: Stage) -> None:
        """Say that nothing more of `stage` follows.

        Raises:
            StoppedEarly: it was to be the last one.
        """
        if stage is self.until:
            raise StoppedEarly

    def _candidate(self, stage: Stage) -> Strategy | None:
        """Return the candidate that a stage's figures are of."""
        return self.tested if stage in (Stage.COMPILE, Stage.MEMORY, Stage.VERIFY) else None
