"""What a quantization method is: full-precision weights of one layer in, codes on a format's grid out."""

from typing import Protocol

import torch

from model_optimizer.formats.base import QuantizedTensor, WeightFormat


class Method(Protocol):
    """Choose scales and codes for one linear layer."""

    @property
    def needs_moments(self) -> bool:
        """Return whether `quantize` weighs errors by the second moment of the layer's input."""

    def quantize(
        self, weight_OI: torch.Tensor, weight_format: WeightFormat, moment_II: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Return the layer on the format's grid; `moment_II` is given exactly where it is needed.

        Raises:
            UnsupportedError: the shape does not fit the format, or a weight is not finite.
        """
