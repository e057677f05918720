"""The one Report document; html, markdown, json and github are renderings of it."""

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.front import ParetoFront
from model_optimizer.artifacts.measure import Dimension, Measure, Verdict
from model_optimizer.artifacts.memory import MemoryPlan
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.artifacts.verification import Verification
from model_optimizer.decisions import Decision


class StageNote(Frozen):
    """One line of the run: which stage, from which store entry, how long it took to make."""

    stage: str
    key: str
    wall_s: float
    started_at: str


class Report(Frozen):
    """Everything that the run found out, in reading order."""

    report_format: int = 1
    name: str
    model_ref: str
    verdict: Verdict
    dimensions: dict[Dimension, Verdict]
    headline: str
    """One sentence: smaller and faster by how much, or why not."""
    measures: tuple[Measure, ...]
    target: TargetProfile
    front: ParetoFront
    quantized: QuantizedModel
    compiled: CompiledModel
    memory: MemoryPlan
    verification: Verification
    decisions: tuple[tuple[str, Decision], ...]
    """(stage, decision), in order."""
    warnings: tuple[str, ...]
    stages: tuple[StageNote, ...]
    versions: dict[str, str]
    seeds: dict[str, int]
