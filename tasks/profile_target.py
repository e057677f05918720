"""Task 1: what the machine, the model and the business are."""

from pathlib import Path

from model_optimizer.artifacts.base import Stage
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.profiling import stage as profiling
from tasks._task import Workplace, stage_task


@stage_task(Stage.PROFILE, TargetProfile)
def profile_target(inputs: profiling.ProfileInputs, workspace: Path, place: Workplace) -> TargetProfile:
    return profiling.profile_target(inputs, workspace, progress=place.progress)
