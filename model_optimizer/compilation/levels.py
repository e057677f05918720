"""Try to build an engine at the asked level; what fails there is tried again at the next lower one.

An attempt fails by its build, by parity, by weights that fell back to float, or in the trial at the edges.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from model_optimizer.artifacts.compiled import Parity
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.compilation.coverage import IntegerCoverage, integer_coverage, quantized_sizes
from model_optimizer.compilation.parity import Reference, compare
from model_optimizer.compilation.registry import BuildRequest, Built, CompileTarget, Variant
from model_optimizer.compilation.smoke import Trial, smoke_run
from model_optimizer.compilation.worker import LAYOUT, REPRODUCE
from model_optimizer.errors import CompileError, UnsupportedError
from model_optimizer.protocols import Progress, RuntimeFactory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bench:
    """What an attempt is made with and held against."""

    target: CompileTarget
    runtime: RuntimeFactory
    reference: Reference
    plan: KvPlan
    label: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One engine, and what was found when it was looked at."""

    level: int
    variant: Variant
    built: Built
    parity: Parity
    coverage: IntegerCoverage | None
    """None where nothing is quantized, or the target does not look."""
    trial: Trial
    build_s: float

    @property
    def fault(self) -> str | None:
        """Say why the engine is not good, or None."""
        parity = None if self.parity.passed else describe(self.parity)
        return parity or (self.coverage.fault if self.coverage else None) or self.trial.fault


@dataclass(frozen=True, slots=True)
class Reached:
    """The engine that is good, and what was tried in vain."""

    attempt: Attempt
    asked_level: int
    because: str
    """Why its level is another than the asked one, or ''."""
    warnings: tuple[str, ...]


def levels_to_try(levels: tuple[int, ...], asked: int) -> tuple[int, ...]:
    """Return those of a target's levels that do not exceed the asked one, highest first; the lowest there is otherwise."""
    return tuple(level for level in sorted(levels, reverse=True) if level <= asked) or (min(levels),)


def build_at_level(bench: Bench, request: BuildRequest, workspace: Path, progress: Progress) -> Reached:
    """Return the first good engine, from the asked level downwards.

    Raises:
        CompileError: no level gives one; carries the last reproduce script.
    """
    asked = request.config.level
    levels = levels_to_try(bench.target.levels(request.recipe), asked)
    failed: list[str] = []
    for level in levels:
        at_level = replace(request, config=request.config.model_copy(update={"level": level}))
        is_last = level == levels[-1]
        for attempt in _attempts(bench, at_level, workspace, progress, failed, is_last=is_last):
            if attempt.fault is None:
                return Reached(attempt, asked, _because(asked, level, levels[0], failed), tuple(failed))
            failed.append(f"{bench.label}{_at(level, levels)} with {attempt.variant.name}: {attempt.fault}")
            log.warning("%s", failed[-1])
    raise CompileError(f"no engine computes what its checkpoint does: {'; '.join(failed)}", _reproduce(workspace))


def _attempts(
    bench: Bench, request: BuildRequest, workspace: Path, progress: Progress, failed: list[str], *, is_last: bool
) -> Iterator[Attempt]:
    """Yield every variant of one level; a failing build or opening ends the level, and everything where no lower one is left."""
    level = request.config.level
    for variant in bench.target.variants(request.recipe):
        progress.note(f"building {bench.label} at level {level}: {variant.name}")
        start = time.monotonic()
        try:
            built = bench.target.build(request, variant, workspace)
            attempt = _looked_at(bench, request, variant, built, workspace, time.monotonic() - start)
        except (CompileError, UnsupportedError) as error:
            if is_last:
                raise
            failed.append(f"{bench.label} at level {level} with {variant.name}: {error}")
            log.warning("%s", failed[-1])
            return
        yield attempt


def _looked_at(bench: Bench, request: BuildRequest, variant: Variant, built: Built, workspace: Path, build_s: float) -> Attempt:
    opened = bench.runtime.open(built.engine, workspace / built.engine.directory, bench.plan)
    try:
        parity = compare(opened, bench.reference, request.config.parity_kl_nats)
        trial = smoke_run(opened, max(bench.reference.sequences, key=len), bench.plan)
    finally:
        opened.close()
    coverage = None
    if request.recipe.quantized and built.integer_layers is not None:
        sizes = quantized_sizes(request.checkpoint, request.model.path)
        coverage = integer_coverage(sizes, built.integer_layers) if sizes else None
    return Attempt(request.config.level, built.variant or variant, built, parity, coverage, trial, build_s)


def describe(parity: Parity) -> str:
    """Return what was found when logits were compared."""
    return (
        f"mean KL {parity.mean_kl_nats:.3g} nats over {parity.num_tokens} tokens (allowed {parity.tolerance_kl_nats:g}), "
        f"top-1 agreement {parity.top1_agreement_ratio:.3f}, largest logit difference {parity.max_abs_logit_difference:.3g}"
    )


def _because(asked: int, reached: int, highest: int, failed: list[str]) -> str:
    if reached == asked:
        return ""
    if reached < highest:
        return f"level {highest} failed: {failed[0]}"
    return f"this target has no level {asked} of its own"


def _at(level: int, levels: tuple[int, ...]) -> str:
    return f" at level {level}" if len(levels) > 1 else ""


def _reproduce(workspace: Path) -> Path:
    script = workspace / REPRODUCE
    return script if script.is_file() else workspace / LAYOUT
