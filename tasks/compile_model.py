"""Task 4: an engine for one strategy, proved to compute what the checkpoint computes."""

from pathlib import Path

from model_optimizer.artifacts.base import Stage
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.compilation import stage as compilation
from tasks._task import Workplace, stage_task


@stage_task(Stage.COMPILE, CompiledModel)
def compile_model(inputs: compilation.CompileInputs, workspace: Path, place: Workplace) -> CompiledModel:
    return compilation.compile_model(inputs, workspace, store=place.store, progress=place.progress)
