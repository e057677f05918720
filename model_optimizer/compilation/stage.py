"""Stage 4: an engine for one strategy, with proof that it computes what its checkpoint computes."""

import time
from dataclasses import dataclass
from pathlib import Path

from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel, Parity
from model_optimizer.artifacts.measure import Dimension, Measure
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.parity import PLAN, compare, parity_sequences, reference_of
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant
from model_optimizer.decisions import Decision
from model_optimizer.errors import CompileError, UnsupportedError
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


@dataclass(frozen=True, slots=True)
class _Attempt:
    variant: Variant
    built: Built
    parity: Parity
    build_s: float


def compile_model(inputs: CompileInputs, workspace: Path, *, store: Store, progress: Progress) -> CompiledModel:
    """Build the engine of a strategy and hold it against its checkpoint.

    Raises:
        UnsupportedError: the runtime cannot run this strategy here.
        CompileError: the build failed, or no variant computes the same within the tolerance.
    """
    runtime, target = RUNTIMES.get(inputs.strategy.runtime), TARGETS.get(inputs.strategy.runtime)
    support = runtime.supports(inputs.strategy)
    if not support.supported:
        raise UnsupportedError(f"{inputs.strategy.label}: {support.reason}")
    request = _request(inputs, store)
    texts, warnings = _parity_texts(inputs)
    progress.note(f"running the checkpoint of {inputs.strategy.label} for reference")
    reference = reference_of(request.checkpoint, parity_sequences(texts))
    attempts: list[_Attempt] = []
    for variant in target.variants(inputs.strategy.weights):
        progress.note(f"building {inputs.strategy.label}: {variant.name}")
        start = time.monotonic()
        built = target.build(request, variant, workspace)
        build_s = time.monotonic() - start
        opened = runtime.open(built.engine, workspace / built.engine.directory, PLAN)
        try:
            parity = compare(opened, reference, inputs.config.parity_kl_nats)
        finally:
            opened.close()
        attempts.append(_Attempt(variant, built, parity, build_s))
        if parity.passed:
            return _artifact(inputs, workspace, attempts, warnings)
        warnings.append(f"{inputs.strategy.label} with {variant.name}: {_describe(parity)}")
    raise CompileError(f"no engine computes what its checkpoint does: {'; '.join(warnings)}", _reproduce(workspace, attempts[-1]))


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


def _artifact(inputs: CompileInputs, workspace: Path, attempts: list[_Attempt], warnings: list[str]) -> CompiledModel:
    last = attempts[-1]
    engine = workspace / last.built.engine.directory
    named = [name for name in (last.built.layout, last.built.reproduce) if name is not None]
    return CompiledModel(
        files=file_refs(workspace, engine, *[workspace / name for name in named]),
        measures=_measures(last),
        decisions=(_decision(inputs, last),),
        warnings=tuple(warnings),
        strategy=inputs.strategy,
        engine=last.built.engine,
        parity=last.parity,
        level=inputs.config.level,
        layout=last.built.layout,
        reproduce=last.built.reproduce,
        build_s=last.build_s,
    )


def _measures(attempt: _Attempt) -> tuple[Measure, ...]:
    parity, tokens = attempt.parity, attempt.parity.num_tokens
    return (
        Measure(name="engine_bytes", dimension=Dimension.RESOURCE, unit="bytes", value=attempt.built.engine.num_bytes),
        Measure(
            name="parity_kl",
            dimension=Dimension.ACCURACY,
            unit="nats",
            value=parity.mean_kl_nats,
            limit=parity.tolerance_kl_nats,
            num_samples=tokens,
            reason="engine against its own checkpoint, held-out text",
        ),
        Measure(
            name="parity_top1_agreement",
            dimension=Dimension.ACCURACY,
            unit="ratio",
            value=parity.top1_agreement_ratio,
            higher_is_better=True,
            num_samples=tokens,
        ),
        Measure(name="build", dimension=Dimension.SPEED, unit="s", value=attempt.build_s),
    )


def _decision(inputs: CompileInputs, attempt: _Attempt) -> Decision:
    return Decision(
        subject=f"engine of {inputs.strategy.label}",
        choice=attempt.variant.name,
        because=attempt.variant.because or "the runtime runs these weights as they are",
        numbers={
            "parity_kl_nats": attempt.parity.mean_kl_nats,
            "tolerance_kl_nats": attempt.parity.tolerance_kl_nats,
            "engine_bytes": float(attempt.built.engine.num_bytes),
        },
    )


def _describe(parity: Parity) -> str:
    return (
        f"mean KL {parity.mean_kl_nats:.3g} nats over {parity.num_tokens} tokens (allowed {parity.tolerance_kl_nats:g}), "
        f"top-1 agreement {parity.top1_agreement_ratio:.3f}, largest logit difference {parity.max_abs_logit_difference:.3g}"
    )


def _reproduce(workspace: Path, attempt: _Attempt) -> Path:
    return workspace / (attempt.built.reproduce or attempt.built.layout)
