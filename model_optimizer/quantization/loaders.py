"""What other loaders make of a checkpoint that is written here, where it is not the same as what this product makes of it.

Source: transformers 5.17.0 with compressed-tensors 0.19.0, tried on tiny models; both cases end in weights that are newly
initialised, with a report on the log and no error.
"""

from collections.abc import Mapping

from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.layers import ModelLayers, is_expert


def loader_warnings(layers: ModelLayers, plan: Mapping[str, str]) -> tuple[str, ...]:
    """Return what must be known before the checkpoint of a plan is given to another loader."""
    on_grid = {name for name, format_name in plan.items() if FORMATS.get(format_name).on_grid}
    found = []
    if any(layer.transposed and layer.name in on_grid for layer in layers.linears):
        found.append(
            "the quantized layers are Conv1D in transformers, which does not load them quantized (it would make up new weights); "
            "stored as linear layers [out, in], they load in this product's runtimes, and in vLLM by its source (not run here)"
        )
    kept_experts = [layer.name for layer in layers.linears if is_expert(layer.name) and layer.name not in on_grid]
    if kept_experts and on_grid:
        found.append(
            f"{len(kept_experts)} matrices of experts stay in full precision beside quantized layers: this product's runtimes "
            "load that, transformers 5.17 does not (it would make up new experts)"
        )
    return tuple(found)
