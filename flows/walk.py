"""Walk a request's stages through the store, as far as their results are held; make nothing."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.compose import Composer, SixStages, Tested
from flows.prepare import Request, source_commit
from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.base import Stage, Stored
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.front import ParetoFront
from model_optimizer.artifacts.memory import MemoryPlan
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.release import Release
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.artifacts.verification import Verification
from model_optimizer.models.resolve import find_resolved
from model_optimizer.store import Store, stage_key
from model_optimizer.strategy.attempts import Trial, next_trial


@dataclass(frozen=True)
class Step:
    """One stage of one round: its key, and its result where the store holds it."""

    stage: Stage
    key: str
    stored: Stored[Any] | None
    round: int = 0


def held_stages(request: Request, root: Path) -> Iterator[Step]:
    """Yield the stages in the order of a run; ends after the first one that is not held."""
    store = Store(root)
    model = find_resolved(request.profile.model, request.base, store)
    if model is None:
        yield Step(Stage.PROFILE, "", None)
        return
    compose = Composer(request, model, source_commit(request.base))
    target = store.find(Stage.PROFILE, key := stage_key(compose.profile()), TargetProfile)
    yield Step(Stage.PROFILE, key, target)
    if target is None:
        return
    front = store.find(Stage.SCAN, key := stage_key(compose.scan(target)), ParetoFront)
    yield Step(Stage.SCAN, key, front)
    if front is None:
        return
    walk = _Walk(compose, store, target, front.artifact.baseline)
    tested: list[Tested] = []
    while trial := next_trial(front.artifact, [it.attempt for it in tested], request.profile.repair.max_rounds):
        found = yield from walk.trial(trial)
        if found is None:
            return
        tested.append(found)
    key = stage_key(compose.package(SixStages(target, front, tuple(tested))))
    yield Step(Stage.PACKAGE, key, store.find(Stage.PACKAGE, key, Release))


@dataclass(frozen=True)
class _Walk:
    """Looks candidates up; the mirror of `flows.trial.Line`, which makes them."""

    compose: Composer
    store: Store
    target: Stored[TargetProfile]
    reference: Strategy

    def trial(self, trial: Trial) -> Generator[Step, None, Tested | None]:
        """Yield the candidate's stages; return it where all of them are held."""
        compose, store, number = self.compose, self.store, trial.round
        key = stage_key(compose.quantize(trial.strategy, trial.rejected))
        quantized = store.find(Stage.QUANTIZE, key, QuantizedModel)
        unquantized = store.find(Stage.QUANTIZE, stage_key(compose.quantize(self.reference)), QuantizedModel)
        yield Step(Stage.QUANTIZE, key, quantized, number)
        if quantized is None or unquantized is None:
            return None
        engine = store.find(Stage.COMPILE, key := stage_key(compose.compile(trial.strategy, quantized)), CompiledModel)
        baseline = store.find(Stage.COMPILE, stage_key(compose.compile(self.reference, unquantized)), CompiledModel)
        yield Step(Stage.COMPILE, key, engine, number)
        if engine is None or baseline is None:
            return None
        memory = store.find(Stage.MEMORY, key := stage_key(compose.memory(engine, self.target)), MemoryPlan)
        yield Step(Stage.MEMORY, key, memory, number)
        if memory is None:
            return None
        verification = store.find(Stage.VERIFY, key := stage_key(compose.verify(engine, baseline, memory)), Verification)
        yield Step(Stage.VERIFY, key, verification, number)
        if verification is None:
            return None
        attempt = Attempt(
            round=number, strategy=trial.strategy, cause=trial.cause, quantized=quantized, verification=verification
        )
        return Tested(attempt, engine, baseline, memory)
