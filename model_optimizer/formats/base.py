"""What a weight format is. Knows one matrix at a time; never models, files or calibration.

Shape letters: O output features, I input features, G groups along I (one per row when per channel).
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One matrix on an integer grid: weight_OI = codes_OI x scale_OG, each scale repeated over its group."""

    codes_OI: torch.Tensor
    """int8, symmetric around zero."""
    scale_OG: torch.Tensor
    """float16, positive."""


class WeightFormat(Protocol):
    """How one linear layer's weight is stored."""

    @property
    def name(self) -> str: ...
    @property
    def bits(self) -> int:
        """Return the payload bits of one weight, scales not counted."""

    @property
    def group_size(self) -> int | None:
        """Return how many inputs share a scale; None = all of them, or no scale at all."""

    @property
    def on_grid(self) -> bool:
        """Return whether weights become integer codes; False for plain floating point."""

    def check(self, out_features: int, in_features: int) -> str | None:
        """Return why a matrix of this shape cannot be stored so, or None. Costs no arithmetic on weights."""

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of payload and scales as stored."""

    def quantize(self, weight_OI: torch.Tensor, scale_OG: torch.Tensor | None = None) -> QuantizedTensor:
        """Round to nearest on the grid that `scale_OG` gives, by default the one that spans the largest magnitude.

        Raises:
            UnsupportedError: the format has no grid, or the shape does not fit.
        """

    def nearest_codes(self, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the grid's closest codes to values of any shape, as floats; `scale` broadcasts against them.

        Raises:
            UnsupportedError: the format has no grid.
        """

    def dequantize(self, tensor: QuantizedTensor) -> torch.Tensor:
        """Return the float32 weight [O, I] that the codes stand for."""

    def round_trip(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the float32 weight [O, I] as it comes back after round-to-nearest storage."""
