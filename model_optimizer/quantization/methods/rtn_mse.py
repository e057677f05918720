"""Round to nearest on the range of least squared error: per group the spanning step is shrunk in twentieths, 1 down to 0.35.

What sticks out is cut to the outermost code. Needs no data.

Shape letters: R outputs that are searched together, I input features, G groups along I.
"""

import torch

from model_optimizer.formats.base import QuantizedTensor, WeightFormat, join
from model_optimizer.quantization.methods.gptq import search_scales
from model_optimizer.quantization.registry import METHODS

CHUNK_ELEMENTS = 2**23
"""Weights that are held in several float32 copies at once."""


class RoundToNearestMse:
    """Data-free and deterministic; never a larger squared error than min-max, whose step is in the search."""

    needs_moments = False

    def quantize(
        self, weight_OI: torch.Tensor, weight_format: WeightFormat, moment_II: torch.Tensor | None = None
    ) -> QuantizedTensor:
        return join([_quantize_rows(rows_RI, weight_format) for rows_RI in weight_OI.split(rows_at_once(weight_OI))])


def rows_at_once(weight_OI: torch.Tensor) -> int:
    """Return how many outputs are searched together: results do not depend on it, memory does."""
    return max(1, CHUNK_ELEMENTS // weight_OI.shape[1])


def _quantize_rows(rows_RI: torch.Tensor, weight_format: WeightFormat) -> QuantizedTensor:
    spanning = weight_format.quantize(rows_RI)
    importance_I = torch.ones(rows_RI.shape[1], device=rows_RI.device)
    scale_RG = search_scales(rows_RI.float(), weight_format, importance_I, spanning)
    return weight_format.quantize(rows_RI, scale_RG, spanning.zero_OG)


METHODS.register("rtn-mse")(RoundToNearestMse())
