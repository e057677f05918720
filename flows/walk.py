"""Walk a request's stages through the store, as far as their results are held; make nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.compose import Composer, SixStages
from flows.optimize import source_commit
from flows.prepare import Request
from model_optimizer.artifacts.base import Stage, Stored
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.front import ParetoFront
from model_optimizer.artifacts.memory import MemoryPlan
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.release import Release
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.artifacts.verification import Verification
from model_optimizer.models.resolve import find_resolved
from model_optimizer.store import Store, stage_key

Step = tuple[Stage, str, Stored[Any] | None]


def held_stages(request: Request, root: Path) -> Iterator[Step]:
    """Yield (stage, key, stored or None); ends after the first stage that is not held."""
    store = Store(root)
    model = find_resolved(request.profile.model, request.base, store)
    if model is None:
        yield Stage.PROFILE, "", None
        return
    compose = Composer(request, model, source_commit(request.base))
    target = store.find(Stage.PROFILE, key := stage_key(compose.profile()), TargetProfile)
    yield Stage.PROFILE, key, target
    if target is None:
        return
    front = store.find(Stage.SCAN, key := stage_key(compose.scan(target)), ParetoFront)
    yield Stage.SCAN, key, front
    if front is None:
        return
    yield from _after_scan(compose, store, target, front)


def _after_scan(compose: Composer, store: Store, target: Stored[TargetProfile], front: Stored[ParetoFront]) -> Iterator[Step]:
    choice, reference = front.artifact.choice, front.artifact.baseline
    quantized = store.find(Stage.QUANTIZE, key := stage_key(compose.quantize(choice)), QuantizedModel)
    unquantized = store.find(Stage.QUANTIZE, stage_key(compose.quantize(reference)), QuantizedModel)
    yield Stage.QUANTIZE, key, quantized
    if quantized is None or unquantized is None:
        return
    engine = store.find(Stage.COMPILE, key := stage_key(compose.compile(choice, quantized)), CompiledModel)
    baseline = store.find(Stage.COMPILE, stage_key(compose.compile(reference, unquantized)), CompiledModel)
    yield Stage.COMPILE, key, engine
    if engine is None or baseline is None:
        return
    memory = store.find(Stage.MEMORY, key := stage_key(compose.memory(engine, target)), MemoryPlan)
    yield Stage.MEMORY, key, memory
    if memory is None:
        return
    verification = store.find(Stage.VERIFY, key := stage_key(compose.verify(engine, baseline, memory)), Verification)
    yield Stage.VERIFY, key, verification
    if verification is None:
        return
    stages = SixStages(target, front, quantized, engine, baseline, memory, verification)
    yield Stage.PACKAGE, (key := stage_key(compose.package(stages))), store.find(Stage.PACKAGE, key, Release)
