"""Task 1: where the model lies, and what the machine, the model and the business are."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from model_optimizer.artifacts.base import Stage
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.models.resolve import ResolvedModel, resolve_model
from model_optimizer.profiling import stage as profiling
from model_optimizer.spec import ModelRef
from tasks._task import Workplace, stage_task


@task(name="source", cache_policy=NO_CACHE, persist_result=False)
def resolve_source(ref: ModelRef, base: Path, place: Workplace) -> ResolvedModel:
    """Find and check the model; an import from another format is kept in the store."""
    return resolve_model(ref, base, place.store, place.progress)


@stage_task(Stage.PROFILE, TargetProfile)
def profile_target(inputs: profiling.ProfileInputs, workspace: Path, place: Workplace) -> TargetProfile:
    return profiling.profile_target(inputs, workspace, progress=place.progress)
