"""Task 5: the KV plan, run at the planned concurrency to see that it holds."""

from pathlib import Path

from model_optimizer.artifacts.base import Stage
from model_optimizer.artifacts.memory import KvPlan, MemoryPlan
from model_optimizer.memory import stage as memory
from model_optimizer.protocols import LogitsRuntime
from model_optimizer.runtimes.registry import RUNTIMES
from tasks._task import Workplace, stage_task


@stage_task(Stage.MEMORY, MemoryPlan)
def plan_memory(inputs: memory.MemoryInputs, workspace: Path, place: Workplace) -> MemoryPlan:
    engine, directory = inputs.engine.artifact.engine, inputs.engine.directory

    def open_runtime(plan: KvPlan) -> LogitsRuntime:
        return RUNTIMES.get(engine.runtime).open(engine, directory / engine.directory, plan)

    return memory.plan_memory(inputs, workspace, open_runtime=open_runtime, progress=place.progress)
