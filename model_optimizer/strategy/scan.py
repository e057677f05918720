"""Stage scan: every strategy that the profile allows, predicted, and measured where prediction cannot decide.

Reads like a table of contents: space, prediction, pruning, building, damage, race, flags, choice, picture.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.front import ParetoFront, Prediction
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.decisions import Decision
from model_optimizer.errors import CompileError, ConfigError, UnsupportedError
from model_optimizer.journal import Journal
from model_optimizer.memory.budget import pages_for, request_tokens
from model_optimizer.memory.config import MemoryConfig
from model_optimizer.memory.plan import default_kv_plan
from model_optimizer.protocols import LogitsRuntime, Progress
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.layers import read_layers
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.spec import Sla, Traffic
from model_optimizer.store import Store, stage_key
from model_optimizer.strategy.config import ScanConfig
from model_optimizer.strategy.damage import Damage, Open, Window, measure_damage, windows
from model_optimizer.strategy.entries import Ingredients, compiled_entry, quantized_entry
from model_optimizer.strategy.figures import Figures, collect_rounds
from model_optimizer.strategy.front import Scanned, assemble
from model_optimizer.strategy.predict import LinearWeights, load_of, predict, prune
from model_optimizer.strategy.race import Heat, Round, race
from model_optimizer.strategy.space import Space, candidates
from model_optimizer.traffic.lengths import build_requests, sample_requests

log = logging.getLogger(__name__)

REFERENCE = Strategy(weights=WeightRecipe(), runtime="torch")
"""What KL is measured against."""
SEED = 0
REQUESTS_PER_STREAM = 2
"""Requests of one round, per stream of the stated concurrency."""
PAGE_TOKENS = MemoryConfig().page_tokens


class ScanInputs(StageInputs):
    """What the scan reads."""

    model: Tree
    target: Stored[TargetProfile]
    sla: Sla
    traffic: Traffic
    config: ScanConfig
    quantization: QuantizationConfig
    compile: CompileConfig
    calibration: CalibrationSource

    @property
    def ingredients(self) -> Ingredients:
        """Return what the entries of every strategy share."""
        return Ingredients(self.fingerprint, self.model, self.quantization, self.compile, self.calibration)


def scan_pareto(inputs: ScanInputs, workspace: Path, *, store: Store, progress: Progress) -> ParetoFront:
    """Measure what prediction cannot decide, flag every candidate, and choose one.

    Raises:
        ConfigError: an unknown runtime or bit width, or no held-out text.
        UnsupportedError, CompileError: no unquantized candidate could be built here.
    """
    layers = read_layers(inputs.model.path).linears
    space = candidates(inputs.config, layers, inputs.quantization.default_precision)
    space, weights = _checkpoints(inputs, space, store, progress)
    predictions = _predictions(inputs, space, weights)
    pruned = space.unsupported | _prune(space, predictions)
    for label, reason in pruned.items():
        log.info("%s is not measured: %s", label, reason)
    survivors = [it for it in space.strategies if it.label not in pruned]
    engines, failed = _build(inputs, survivors, store, progress)
    documents = prepare(inputs.calibration, inputs.model.path).held_out
    if not documents:
        raise ConfigError(f"no held-out text in {inputs.calibration.tree.path}: the scan needs it for KL; give more records")
    damage = _damage(inputs, engines, documents, workspace, store=store, progress=progress)
    rounds = _race(inputs, engines, documents, workspace, progress)
    scanned = Scanned(
        space=space,
        predictions=predictions,
        pruned=pruned | failed,
        figures=_figures(inputs, engines, predictions, damage, rounds),
        warnings=tuple(f"{label} could not be built: {reason}" for label, reason in failed.items()),
    )
    return assemble(scanned, inputs.sla, inputs.config, workspace)


def _prune(space: Space, predictions: Mapping[str, Prediction]) -> dict[str, str]:
    """Return why quantized candidates need not run; where the precision is pinned, lossless ones are no alternative."""
    possible = [it for it in space.strategies if it.label not in space.unsupported]
    quantized = [it.label for it in possible if it.weights.quantized]
    rivals = quantized if space.pinned else [it.label for it in possible]
    return prune({label: predictions[label] for label in rivals}, quantized)


def _checkpoints(
    inputs: ScanInputs, space: Space, store: Store, progress: Progress
) -> tuple[Space, dict[WeightRecipe, LinearWeights]]:
    """Return bytes and predicted damage of every recipe's checkpoint, and the space without recipes that have none.

    A mixed budget has none where the KL breaker leaves it too few cheap layers.
    """
    weights, impossible = {}, {}
    for recipe in progress.track(list(dict.fromkeys(it.weights for it in space.strategies)), "checkpoints"):
        try:
            quantized = quantized_entry(inputs.ingredients, recipe, store=store, progress=progress).artifact
        except UnsupportedError as error:
            if recipe.bits_budget is None:
                raise
            log.warning("%s is left out: %s", recipe.label, error)
            impossible[recipe] = Decision(subject=recipe.label, choice="left out of the space", because=str(error))
            continue
        weights[recipe] = LinearWeights(sum(layer.num_bytes for layer in quantized.plan), quantized.predicted_kl_nats)
    kept = tuple(it for it in space.strategies if it.weights in weights)
    unsupported = {it.label: space.unsupported[it.label] for it in kept if it.label in space.unsupported}
    decisions = (*space.decisions, *impossible.values())
    return replace(space, strategies=kept, unsupported=unsupported, decisions=decisions), weights


def _predictions(inputs: ScanInputs, space: Space, weights: Mapping[WeightRecipe, LinearWeights]) -> dict[str, Prediction]:
    """Predict every candidate."""
    target = inputs.target.artifact
    load = load_of(inputs.traffic, inputs.sla)
    return {it.label: predict(it, weights[it.weights], target.device, target.model, load) for it in space.strategies}


def _build(
    inputs: ScanInputs, survivors: list[Strategy], store: Store, progress: Progress
) -> tuple[dict[str, Stored[CompiledModel]], dict[str, str]]:
    """Return the engines by label, and why a quantized one could not be built; an unquantized failure ends the scan."""
    engines, failed = {}, {}
    for strategy in progress.track(survivors, "engines"):
        try:
            engines[strategy.label] = compiled_entry(inputs.ingredients, strategy, store=store, progress=progress)
        except (CompileError, UnsupportedError) as error:
            if not strategy.weights.quantized:
                raise
            log.warning("%s could not be built and is left out: %s", strategy.label, error)
            failed[strategy.label] = str(error)
    return engines, failed


def _opener(inputs: ScanInputs, entry: Stored[CompiledModel]) -> Open:
    """Return how to open an engine with room for the stated concurrency."""
    engine, plan = entry.artifact.engine, default_kv_plan(inputs.target.artifact.model, inputs.sla, PAGE_TOKENS)

    def open_engine() -> LogitsRuntime:
        return RUNTIMES.get(engine.runtime).open(engine, entry.directory / engine.directory, plan)

    return open_engine


def _damage(
    inputs: ScanInputs,
    engines: Mapping[str, Stored[CompiledModel]],
    documents: tuple[Window, ...],
    workspace: Path,
    *,
    store: Store,
    progress: Progress,
) -> dict[str, Damage]:
    longest = min(inputs.sla.max_model_len, inputs.target.artifact.model.max_position)
    texts = windows(documents, inputs.config.kl_tokens, longest)
    reference = engines.get(REFERENCE.label) or compiled_entry(inputs.ingredients, REFERENCE, store=store, progress=progress)
    openers = {label: _opener(inputs, entry) for label, entry in engines.items()}
    journal = Journal(workspace / "damage.jsonl", stage_key(inputs), Damage)
    return measure_damage(openers, _opener(inputs, reference), texts, journal, progress)


def _race(
    inputs: ScanInputs,
    engines: Mapping[str, Stored[CompiledModel]],
    documents: tuple[Window, ...],
    workspace: Path,
    progress: Progress,
) -> tuple[Round, ...]:
    """Run the stated traffic, prompts cut from held-out text, in rounds over all engines."""
    longest = min(inputs.sla.max_model_len, inputs.target.artifact.model.max_position)
    shapes = sample_requests(inputs.traffic, longest, REQUESTS_PER_STREAM * inputs.sla.concurrency, SEED)
    requests = build_requests(shapes, [token for document in documents for token in document], SEED)
    openers = {label: _opener(inputs, entry) for label, entry in engines.items()}
    heat = Heat(requests, inputs.sla.concurrency, inputs.config.rounds)
    return race(openers, heat, Journal(workspace / "rounds.jsonl", stage_key(inputs), Round), progress)


def _figures(
    inputs: ScanInputs,
    engines: Mapping[str, Stored[CompiledModel]],
    predictions: Mapping[str, Prediction],
    damage: Mapping[str, Damage],
    rounds: tuple[Round, ...],
) -> tuple[Figures, ...]:
    pages = inputs.sla.concurrency * pages_for(request_tokens(inputs.traffic, inputs.sla), PAGE_TOKENS)
    kv_bytes = pages * PAGE_TOKENS * inputs.target.artifact.model.kv_bytes_per_token
    return tuple(
        Figures(
            strategy=entry.artifact.strategy,
            predicted=predictions[label],
            damage=damage[label],
            speed=collect_rounds(rounds, label),
            engine_bytes=entry.artifact.engine.num_bytes,
            kv_bytes=kv_bytes,
        )
        for label, entry in engines.items()
    )
