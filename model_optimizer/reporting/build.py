"""Build the one Report from the stored results of the stages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from model_optimizer.artifacts.base import StageArtifact, Stored
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.front import ParetoFront
from model_optimizer.artifacts.memory import MemoryPlan
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.repair import RepairRound
from model_optimizer.artifacts.report import Report, StageNote, StageResults
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.artifacts.verification import Verification
from model_optimizer.reporting.headline import headline_figures, headline_measures, headline_sentence

A = TypeVar("A", bound=StageArtifact)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the report says of the run itself."""

    name: str
    model_ref: str
    source_bytes: int
    """Size of the weight file as it came."""
    versions: Mapping[str, str]
    seeds: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StoredStages:
    """The stored results of the six stages before package."""

    target: Stored[TargetProfile]
    front: Stored[ParetoFront]
    quantized: Stored[QuantizedModel]
    compiled: Stored[CompiledModel]
    memory: Stored[MemoryPlan]
    verification: Stored[Verification]

    @property
    def results(self) -> StageResults:
        """Return the artifacts alone."""
        return StageResults(
            target=self.target.artifact,
            front=self.front.artifact,
            quantized=self.quantized.artifact,
            compiled=self.compiled.artifact,
            memory=self.memory.artifact,
            verification=self.verification.artifact,
        )

    def notes(self) -> tuple[StageNote, ...]:
        """Return when and how long every stage worked; not whether in this run, for a resumed run's report is the same."""
        return (
            _note("profile", self.target),
            _note("scan", self.front),
            _note("quantize", self.quantized),
            _note("compile", self.compiled),
            _note("memory", self.memory),
            _note("verify", self.verification),
        )


def build_report(run: RunFacts, stages: StoredStages, *, rounds: tuple[RepairRound, ...] = ()) -> Report:
    """Return the report of a run and its repair rounds; it invents no figure and drops no warning."""
    results = stages.results
    figures = headline_figures(results, run.source_bytes)
    return Report(
        name=run.name,
        model_ref=run.model_ref,
        verdict=results.verdict(),
        dimensions=results.dimensions(),
        headline=headline_sentence(results, figures),
        figures=figures,
        measures=(*results.measures(), *headline_measures(results, figures)),
        target=results.target,
        front=results.front,
        quantized=results.quantized,
        compiled=results.compiled,
        memory=results.memory,
        verification=results.verification,
        rounds=rounds,
        decisions=tuple((name, decision) for name, stage in results.stages() for decision in stage.decisions),
        warnings=_warnings(results),
        stages=stages.notes(),
        versions=dict(run.versions),
        seeds=dict(run.seeds),
    )


def _warnings(results: StageResults) -> tuple[str, ...]:
    """Return every stage's warnings and skips, in order."""
    lines: list[str] = []
    for name, stage in results.stages():
        lines += [f"{name}: {warning}" for warning in stage.warnings]
        if stage.skipped_because is not None:
            lines.append(f"{name}: skipped because {stage.skipped_because}")
    return tuple(lines)


def _note(name: str, stored: Stored[A]) -> StageNote:
    produced = stored.produced
    return StageNote(stage=name, key=stored.key, wall_s=produced.wall_s, started_at=produced.started_at)
