"""Stage 4: an engine for one strategy, with proof that it computes what its checkpoint computes."""

from pathlib import Path

from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.findings import decisions_of, measures_of
from model_optimizer.compilation.levels import Bench, Reached, build_at_level
from model_optimizer.compilation.parity import PLAN, parity_sequences, reference_of
from model_optimizer.compilation.registry import TARGETS, BuildRequest
from model_optimizer.errors import UnsupportedError
from model_optimizer.models.facts import read_facts
from model_optimizer.protocols import Progress
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.store import Store, file_refs


class CompileInputs(StageInputs):
    """What an engine depends on."""

    model: Tree
    quantized: Stored[QuantizedModel]
    strategy: Strategy
    config: CompileConfig
    calibration: CalibrationSource
    """Its held-out text is what parity runs on."""


def compile_model(inputs: CompileInputs, workspace: Path, *, store: Store, progress: Progress) -> CompiledModel:
    """Build the engine of a strategy and hold it against its checkpoint.

    Raises:
        UnsupportedError: the runtime cannot run this strategy here.
        CompileError: at no level was there an engine that computes the same within the tolerance, from codes where the
            checkpoint has them, up to its edges.
    """
    runtime, target = RUNTIMES.get(inputs.strategy.runtime), TARGETS.get(inputs.strategy.runtime)
    support = runtime.supports(inputs.strategy)
    if not support.supported:
        raise UnsupportedError(f"{inputs.strategy.label}: {support.reason}")
    request = _request(inputs, store)
    texts, warnings = _parity_texts(inputs)
    plan = _plan(inputs.model.path)
    progress.note(f"running the checkpoint of {inputs.strategy.label} for reference")
    reference = reference_of(request.checkpoint, tuple(text[: plan.max_model_len] for text in parity_sequences(texts)))
    bench = Bench(target, runtime, reference, plan, inputs.strategy.label)
    reached = build_at_level(bench, request, workspace, progress)
    return _artifact(inputs, workspace, reached, (*warnings, *reached.warnings))


def _plan(model: Path) -> KvPlan:
    """Return room for what the checks run, no longer than the model knows positions."""
    known = read_facts(model).max_position or PLAN.max_model_len
    return PLAN.model_copy(update={"max_model_len": min(PLAN.max_model_len, known)})


def _request(inputs: CompileInputs, store: Store) -> BuildRequest:
    quantized = inputs.quantized
    checkpoint = quantized.artifact.checkpoint
    return BuildRequest(
        model=inputs.model,
        checkpoint=inputs.model.path if checkpoint is None else quantized.directory / checkpoint,
        recipe=inputs.strategy.weights,
        config=inputs.config,
        fingerprint=inputs.fingerprint,
        store=store,
    )


def _parity_texts(inputs: CompileInputs) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """Return held-out token sequences, or the calibration samples with a warning where nothing was held out."""
    prepared = prepare(inputs.calibration, inputs.model.path)
    if prepared.held_out:
        return prepared.held_out, []
    return prepared.samples, ["parity ran on calibration text: nothing was held out"]


def _artifact(inputs: CompileInputs, workspace: Path, reached: Reached, warnings: tuple[str, ...]) -> CompiledModel:
    attempt = reached.attempt
    engine = workspace / attempt.built.engine.directory
    named = [name for name in (attempt.built.layout, attempt.built.reproduce) if name is not None]
    return CompiledModel(
        files=file_refs(workspace, engine, *[workspace / name for name in named]),
        measures=measures_of(attempt, quantized=inputs.strategy.weights.quantized),
        decisions=decisions_of(inputs.strategy.label, reached),
        warnings=warnings,
        strategy=inputs.strategy,
        engine=attempt.built.engine,
        parity=attempt.parity,
        level=attempt.level,
        layout=attempt.built.layout,
        reproduce=attempt.built.reproduce,
        build_s=attempt.build_s,
        asked_level=reached.asked_level,
        level_because=reached.because,
    )
