"""Task 2: which strategies are worth having, and which one the service level chooses."""

from pathlib import Path

from model_optimizer.artifacts.base import Stage
from model_optimizer.artifacts.front import ParetoFront
from model_optimizer.strategy import scan
from tasks._task import Workplace, stage_task


@stage_task(Stage.SCAN, ParetoFront)
def scan_pareto(inputs: scan.ScanInputs, workspace: Path, place: Workplace) -> ParetoFront:
    return scan.scan_pareto(inputs, workspace, store=place.store, progress=place.progress)
