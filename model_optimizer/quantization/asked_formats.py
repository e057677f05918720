"""Which formats the sensitivity pass measures for a recipe, and under which names its figures are known.

Every pass measures the scanned formats, so that all usual recipes share it. Another format that a recipe or the profile asks for
joins; one that stores the same weights as a measured one shares its figures, for rounding of inputs is in none of them.
"""

from collections.abc import Iterable

from model_optimizer.artifacts.quantized import LayerSensitivity, Sensitivity
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.layers import LinearLayer, fitting_formats

INPUTS_NOTE = "; rounding of inputs is not in it"


def asked_formats(recipe: WeightRecipe, config: QuantizationConfig) -> tuple[str, ...]:
    """Return the formats on a grid that some layer may get, sorted."""
    names = {*recipe.formats, *(override.precision for override in config.layer_overrides)}
    return tuple(sorted(name for name in names if FORMATS.get(name).on_grid))


def measured_formats(layers: tuple[LinearLayer, ...], asked: Iterable[str]) -> tuple[str, ...]:
    """Return what the pass measures: the scanned formats that fit, then what else is asked for, sorted."""
    scanned = fitting_formats(layers)
    more = {FORMATS.get(name).weights_as for name in asked} - set(scanned)
    fitting = (name for name in more if not any(FORMATS.get(name).check(it.out_features, it.in_features) for it in layers))
    return (*scanned, *sorted(fitting))


def with_shared_figures(sensitivity: Sensitivity, asked: Iterable[str]) -> Sensitivity:
    """Return the sensitivity with figures under the name of every asked format whose weights were measured as another's."""
    names = tuple(asked)
    return sensitivity.model_copy(update={"layers": tuple(_with_shared(layer, names) for layer in sensitivity.layers)})


def _with_shared(layer: LayerSensitivity, names: tuple[str, ...]) -> LayerSensitivity:
    twins = {name: FORMATS.get(name).weights_as for name in names if FORMATS.get(name).weights_as in layer.predicted_kl_nats}
    kl_nats = {name: layer.predicted_kl_nats[twin] for name, twin in twins.items()}
    cosine = {name: layer.output_cosine[twin] for name, twin in twins.items()}
    return layer.model_copy(
        update={"predicted_kl_nats": layer.predicted_kl_nats | kl_nats, "output_cosine": layer.output_cosine | cosine}
    )


def rounds_inputs(names: Iterable[str]) -> bool:
    """Return whether some format rounds the layer's input too."""
    return any(FORMATS.get(name).activation is not None for name in names)
