"""The one Report document; html, markdown, json and github are renderings of it.

The verdict over all stages is decided here, so that the report and the sign-off cannot disagree.
"""

from dataclasses import dataclass

from model_optimizer.artifacts.base import Frozen, StageArtifact
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.front import ParetoFront
from model_optimizer.artifacts.measure import Dimension, Measure, Verdict
from model_optimizer.artifacts.memory import MemoryPlan
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.repair import RepairRound
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.artifacts.verification import Verification
from model_optimizer.decisions import Decision

_SEVERITY = (Verdict.ACCEPT, Verdict.INCONCLUSIVE, Verdict.REJECT)


def worst(verdicts: tuple[Verdict, ...]) -> Verdict:
    """Return the most severe verdict: REJECT over INCONCLUSIVE over ACCEPT; at least one is needed."""
    return max(verdicts, key=_SEVERITY.index)


@dataclass(frozen=True, slots=True)
class StageResults:
    """What the six stages before package found out."""

    target: TargetProfile
    front: ParetoFront
    quantized: QuantizedModel
    compiled: CompiledModel
    memory: MemoryPlan
    verification: Verification

    def stages(self) -> tuple[tuple[str, StageArtifact], ...]:
        """Return (stage, artifact) in the order of the run."""
        return (
            ("profile", self.target),
            ("scan", self.front),
            ("quantize", self.quantized),
            ("compile", self.compiled),
            ("memory", self.memory),
            ("verify", self.verification),
        )

    def measures(self) -> tuple[Measure, ...]:
        """Return every stage's measures; of two with one name the later stage's stands."""
        found = {(measure.dimension, measure.name): measure for _, stage in self.stages() for measure in stage.measures}
        order = list(Dimension)
        return tuple(sorted(found.values(), key=lambda measure: order.index(measure.dimension)))

    def dimensions(self) -> dict[Dimension, Verdict]:
        """Return per dimension the worst of verification's verdict and of every measure that gates."""
        gates = [(measure.dimension, measure.verdict) for measure in self.measures()]
        return {
            dimension: worst((verdict, *(gate for where, gate in gates if where is dimension and gate is not None)))
            for dimension, verdict in self.verification.dimensions.items()
        }

    def verdict(self) -> Verdict:
        """Return the verdict over all dimensions."""
        return worst((self.verification.verdict, *self.dimensions().values()))


class StageNote(Frozen):
    """One line of the run: which stage, from which store entry, how long it took to make."""

    stage: str
    key: str
    wall_s: float
    started_at: str


class Headline(Frozen):
    """The figures in large type. A ratio is chosen over baseline; None where it was not measured."""

    size_ratio: float
    """Engine bytes over 2 bytes per parameter."""
    engine_bytes: int
    source_bytes: int
    """Weight file as it came."""
    speed_ratio: float | None
    speed_ratio_lower: float | None
    speed_ratio_upper: float | None
    decode_tok_per_s: float | None
    accuracy_difference: float | None
    """Candidate - baseline score on the gating golden set that is closest to its margin."""
    accuracy_lower: float | None
    accuracy_upper: float | None
    accuracy_set: str | None
    peak_bytes: int


class Report(Frozen):
    """Everything that the run found out, in reading order."""

    report_format: int = 1
    name: str
    model_ref: str
    verdict: Verdict
    dimensions: dict[Dimension, Verdict]
    headline: str
    """One sentence: smaller and faster by how much, or why not."""
    figures: Headline
    measures: tuple[Measure, ...]
    target: TargetProfile
    front: ParetoFront
    quantized: QuantizedModel
    compiled: CompiledModel
    memory: MemoryPlan
    verification: Verification
    rounds: tuple[RepairRound, ...] = ()
    """Candidates in the order tried; one where the first was not rejected for accuracy."""
    decisions: tuple[tuple[str, Decision], ...]
    """(stage, decision), in order."""
    warnings: tuple[str, ...]
    stages: tuple[StageNote, ...]
    versions: dict[str, str]
    seeds: dict[str, int]
