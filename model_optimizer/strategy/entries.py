"""The store entries that scan shares with the quantize and compile stages: same inputs, hence same keys.

The scan makes them for every surviving candidate; the stages behind it find the chosen one's finished.
"""

from dataclasses import dataclass

from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.base import Stage, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.stage import CompileInputs, compile_model
from model_optimizer.protocols import Progress
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.shared import QuantizeInputs
from model_optimizer.quantization.stage import quantize
from model_optimizer.store import Store, stage_key


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What every strategy's entries have in common."""

    fingerprint: str
    model: Tree
    quantization: QuantizationConfig
    compile: CompileConfig
    calibration: CalibrationSource


def quantize_inputs(shared: Ingredients, recipe: WeightRecipe, rejected: Attempt | None = None) -> QuantizeInputs:
    """Return the identity of a recipe's checkpoint; of a repaired one with the attempt that it repairs."""
    return QuantizeInputs(
        fingerprint=shared.fingerprint,
        model=shared.model,
        recipe=recipe,
        calibration=shared.calibration,
        config=shared.quantization,
        rejected=rejected,
    )


def quantized_entry(shared: Ingredients, recipe: WeightRecipe, *, store: Store, progress: Progress) -> Stored[QuantizedModel]:
    """Return the checkpoint of a recipe from the store, made where it is not there."""
    inputs = quantize_inputs(shared, recipe)
    return store.produce(
        Stage.QUANTIZE,
        stage_key(inputs),
        QuantizedModel,
        lambda workspace: quantize(inputs, workspace, store=store, progress=progress),
    )


def compile_inputs(shared: Ingredients, strategy: Strategy, quantized: Stored[QuantizedModel]) -> CompileInputs:
    """Return the identity of a strategy's engine."""
    return CompileInputs(
        fingerprint=shared.fingerprint,
        model=shared.model,
        quantized=quantized,
        strategy=strategy,
        config=shared.compile,
        calibration=shared.calibration,
    )


def compiled_entry(shared: Ingredients, strategy: Strategy, *, store: Store, progress: Progress) -> Stored[CompiledModel]:
    """Return the engine of a strategy from the store, made (with its checkpoint) where it is not there."""
    quantized = quantized_entry(shared, strategy.weights, store=store, progress=progress)
    inputs = compile_inputs(shared, strategy, quantized)
    return store.produce(
        Stage.COMPILE,
        stage_key(inputs),
        CompiledModel,
        lambda workspace: compile_model(inputs, workspace, store=store, progress=progress),
    )
