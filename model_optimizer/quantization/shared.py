"""What all recipes of one model share: measured once, kept in the store under what it depends on alone."""

from model_optimizer.artifacts.activation_scales import ActivationRanges
from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.moments import Moments
from model_optimizer.artifacts.quantized import Sensitivity
from model_optimizer.artifacts.reallocation import MixSlopes
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.protocols import Progress
from model_optimizer.quantization.activation_scales import KIND as RANGES
from model_optimizer.quantization.activation_scales import RangesInputs, measure_ranges
from model_optimizer.quantization.asked_formats import asked_formats, measured_formats, with_shared_figures
from model_optimizer.quantization.breaker import GroupRule
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.layers import read_layers
from model_optimizer.quantization.moments import KIND as MOMENTS
from model_optimizer.quantization.moments import MomentsInputs, measure_moments
from model_optimizer.quantization.reallocation import KIND as SLOPES
from model_optimizer.quantization.reallocation import SlopesInputs, measure_slopes
from model_optimizer.quantization.sensitivity import KIND, SensitivityInputs, measure_sensitivity
from model_optimizer.store import Store, stage_key


class QuantizeInputs(StageInputs):
    """Everything that quantization reads."""

    model: Tree
    recipe: WeightRecipe
    calibration: CalibrationSource
    config: QuantizationConfig
    rejected: Attempt | None = None
    """The candidate whose accuracy gate rejected; its layers are raised."""


def shared_sensitivity(inputs: QuantizeInputs, store: Store, *, progress: Progress) -> Stored[Sensitivity]:
    """Return the model's sensitivity from the store, measured once for all recipes."""
    asked = asked_formats(inputs.recipe, inputs.config)
    formats = measured_formats(read_layers(inputs.model.path).linears, asked)
    wanted = SensitivityInputs(
        fingerprint=inputs.fingerprint,
        model=inputs.model,
        calibration=inputs.calibration,
        formats=formats,
        num_sequences=inputs.config.sensitivity_sequences,
        max_tokens=inputs.config.sensitivity_tokens,
        seed=inputs.config.seed,
    )
    key = stage_key(wanted)
    found = store.produce(KIND, key, Sensitivity, lambda workspace: measure_sensitivity(wanted, workspace, progress=progress))
    return found.model_copy(update={"artifact": with_shared_figures(found.artifact, asked)})


def shared_slopes(
    inputs: QuantizeInputs, rules: tuple[GroupRule, ...], plan: dict[str, str], store: Store, progress: Progress
) -> Stored[MixSlopes]:
    """Return the slopes of KL at a mix from the store, measured once for all methods."""
    wanted = SlopesInputs(
        fingerprint=inputs.fingerprint,
        model=inputs.model,
        calibration=inputs.calibration,
        plan=plan,
        formats={layer.name: rule.formats for rule in rules if len(rule.formats) > 1 for layer in rule.layers},
        num_sequences=inputs.config.reallocation_sequences,
        max_tokens=inputs.config.sensitivity_tokens,
    )
    return store.produce(
        SLOPES, stage_key(wanted), MixSlopes, lambda workspace: measure_slopes(wanted, workspace, progress=progress)
    )


def shared_moments(inputs: QuantizeInputs, store: Store, *, progress: Progress) -> Stored[Moments]:
    """Return the second moments of the model's layer inputs from the store, measured once for all recipes."""
    wanted = MomentsInputs(
        fingerprint=inputs.fingerprint,
        model=inputs.model,
        calibration=inputs.calibration,
        num_sequences=inputs.config.moments_sequences,
        max_tokens=inputs.config.moments_tokens,
    )
    return store.produce(
        MOMENTS, stage_key(wanted), Moments, lambda workspace: measure_moments(wanted, workspace, progress=progress)
    )


def shared_ranges(inputs: QuantizeInputs, store: Store, *, progress: Progress) -> Stored[ActivationRanges]:
    """Return how far the model's layer inputs reach from the store, measured once for all formats with frozen steps."""
    wanted = RangesInputs(
        fingerprint=inputs.fingerprint,
        model=inputs.model,
        calibration=inputs.calibration,
        num_sequences=inputs.config.moments_sequences,
        max_tokens=inputs.config.moments_tokens,
        percentile=inputs.config.activation_percentile,
    )
    return store.produce(
        RANGES, stage_key(wanted), ActivationRanges, lambda workspace: measure_ranges(wanted, workspace, progress=progress)
    )
