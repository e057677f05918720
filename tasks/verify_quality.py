"""Task 6: golden sets, latency and soak, with a verdict in each dimension."""

from pathlib import Path

from model_optimizer.artifacts.base import Stage
from model_optimizer.artifacts.verification import Verification
from model_optimizer.verification import stage as verification
from tasks._task import Workplace, stage_task


@stage_task(Stage.VERIFY, Verification)
def verify_quality(inputs: verification.VerifyInputs, workspace: Path, place: Workplace) -> Verification:
    return verification.verify_quality(inputs, workspace, progress=place.progress)
