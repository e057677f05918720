"""What a candidate fold costs: the output error that its rounding would leave, in the coordinates of the original model.

    error = sum over layers of tr(dW H dW^T),  dW = unfold(round(fold(W))) - W,  H the input's second moment

No forward pass: weights and one moment per layer input are all that is read.

Shape letters: O output features, I input features.
"""

from collections.abc import Mapping

import torch

from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.transforms.base import Edit


def output_error(change_OI: torch.Tensor, moment_II: torch.Tensor) -> float:
    """Return tr(dW H dW^T): the mean squared change of the layer's output per token, summed over outputs."""
    of_outputs_O: torch.Tensor = torch.linalg.vecdot(change_OI @ moment_II, change_OI)
    return of_outputs_O.double().sum().item()


def rounding_error(
    weights_OI: Mapping[str, torch.Tensor], formats: Mapping[str, str], moment_II: torch.Tensor, fold: Edit, unfold: Edit
) -> float:
    """Return the error of layers that read one input when they are folded, rounded to nearest and unfolded again.

    `formats` holds formats with a grid; layers without one cost nothing.
    """
    total = 0.0
    for layer, format_name in formats.items():
        rounded_OI = unfold(FORMATS.get(format_name).round_trip(fold(weights_OI[layer])))
        total += output_error(rounded_OI - weights_OI[layer], moment_II)
    return total
