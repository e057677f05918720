"""The seven stages called one after another, without Prefect and MLflow: what `flows.optimize` does, less the orchestration."""

from pathlib import Path
from typing import TypeVar

from flows.compose import Composer, SixStages, Tested
from flows.prepare import read_request, source_commit
from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.base import StageArtifact, StageInputs, Stored
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.models.resolve import resolve_model
from model_optimizer.protocols import Quiet
from model_optimizer.store import Store, stage_key
from model_optimizer.strategy.attempts import Trial, next_trial
from tasks._task import StageTask, Workplace
from tasks.compile_model import compile_model
from tasks.package_release import package_release
from tasks.plan_memory import plan_memory
from tasks.profile_target import profile_target
from tasks.quantize_layers import quantize_layers
from tasks.scan_pareto import scan_pareto
from tasks.verify_quality import verify_quality

I = TypeVar("I", bound=StageInputs)  # noqa: E741
A = TypeVar("A", bound=StageArtifact)


def run_directly(profile: Path, root: Path) -> None:
    """Run the seven stages of a profile; results lie in the store below `root` as after a run of the flow."""
    request = read_request(profile)
    place = Workplace(root, Store(root / "store"), Quiet())
    model = resolve_model(request.profile.model, request.base, place.store, place.progress)
    compose = Composer(request, model, source_commit(request.base))
    target = _made(profile_target, compose.profile(), place)
    front = _made(scan_pareto, compose.scan(target), place)
    tested: list[Tested] = []
    while trial := next_trial(front.artifact, [it.attempt for it in tested], request.profile.repair.max_rounds):
        tested.append(_tested(trial, compose, place, target, front.artifact.baseline))
    _made(package_release, compose.package(SixStages(target, front, tuple(tested))), place)


def _tested(trial: Trial, compose: Composer, place: Workplace, target: Stored[TargetProfile], reference: Strategy) -> Tested:
    quantized = _made(quantize_layers, compose.quantize(trial.strategy, trial.rejected), place)
    unquantized = _made(quantize_layers, compose.quantize(reference), place)
    engine = _made(compile_model, compose.compile(trial.strategy, quantized), place)
    baseline = _made(compile_model, compose.compile(reference, unquantized), place)
    memory = _made(plan_memory, compose.memory(engine, target), place)
    verification = _made(verify_quality, compose.verify(engine, baseline, memory), place)
    attempt = Attempt(
        round=trial.round, strategy=trial.strategy, cause=trial.cause, quantized=quantized, verification=verification
    )
    return Tested(attempt, engine, baseline, memory)


def _made(stage: StageTask[I, A], inputs: I, place: Workplace) -> Stored[A]:
    """Return a stage's result from the store, or make it there."""
    return place.store.produce(
        stage.stage, stage_key(inputs), stage.artifact_type, lambda workspace: stage.function(inputs, workspace, place)
    )
