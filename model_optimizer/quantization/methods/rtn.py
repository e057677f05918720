"""Round to nearest: scales span the largest magnitude, every weight goes to its closest code. Needs no data."""

import torch

from model_optimizer.formats.base import QuantizedTensor, WeightFormat
from model_optimizer.quantization.registry import METHODS


class RoundToNearest:
    """Data-free and deterministic."""

    needs_moments = False

    def quantize(
        self, weight_OI: torch.Tensor, weight_format: WeightFormat, moment_II: torch.Tensor | None = None
    ) -> QuantizedTensor:
        return weight_format.quantize(weight_OI)


METHODS.register("rtn")(RoundToNearest())
