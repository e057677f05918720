"""What a bundle's papers may say of its engine: measures and scores as they were found, none of them made up."""

from dataclasses import dataclass

from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.measure import Measure, Origin
from model_optimizer.release.inputs import PackageInputs


@dataclass(frozen=True, slots=True)
class Score:
    """How one engine did on one golden set, or on a slice of it."""

    golden_set: str
    slice: str | None
    metric: str
    value: float
    num_items: int


def is_baseline(inputs: PackageInputs, compiled: CompiledModel) -> bool:
    """Return whether an engine is the one that the others are compared with."""
    return compiled.strategy == inputs.baseline_engine.artifact.strategy


def measures(inputs: PackageInputs, compiled: CompiledModel) -> tuple[Measure, ...]:
    """Return what was found out about an engine; of the baseline what the others were compared with."""
    found = inputs.results.measures()
    if not is_baseline(inputs, compiled):
        return found
    return tuple(
        Measure(
            name=it.name, dimension=it.dimension, unit=it.unit, value=it.baseline, num_samples=it.num_samples, origin=it.origin
        )
        for it in found
        if it.baseline is not None and it.origin is not Origin.NOT_MEASURED
    )


def scores(inputs: PackageInputs, compiled: CompiledModel) -> tuple[Score, ...]:
    """Return an engine's score on every golden set and slice."""
    own = not is_baseline(inputs, compiled)
    return tuple(
        Score(it.golden_set, it.slice, it.metric, it.candidate_ratio if own else it.baseline_ratio, it.num_items)
        for it in inputs.verification.artifact.golden
    )


def unmeasured(inputs: PackageInputs, compiled: CompiledModel) -> tuple[str, ...]:
    """Return a sentence on everything that was not measured, and why."""
    return tuple(f"{it.metric} was not measured: {it.reason}" for it in measures(inputs, compiled) if it.value is None)


def warnings(inputs: PackageInputs) -> tuple[str, ...]:
    """Return the doubts of all stages, each once."""
    return tuple(dict.fromkeys(warning for _, stage in inputs.results.stages() for warning in stage.warnings))
