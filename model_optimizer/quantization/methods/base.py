"""What a quantization method is: full-precision weights of one layer in, codes on a format's grid out."""

from typing import Protocol

import torch

from model_optimizer.formats.base import QuantizedTensor, WeightFormat


class Method(Protocol):
    """Choose scales and codes for one linear layer."""

    def quantize(self, weight_OI: torch.Tensor, weight_format: WeightFormat) -> QuantizedTensor:
        """Return the layer on the format's grid.

        Raises:
            UnsupportedError: the shape does not fit the format, or a weight is not finite.
        """
