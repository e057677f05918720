"""What a weight format is. Knows one matrix at a time; never models, files or calibration.

Shape letters: O output features, I input features, G groups along I (one per row when per channel).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Activation = Literal["dynamic-token", "static-tensor"]
"""How a layer's input is rounded while the model runs: one step per token found on the spot, or one per tensor frozen before."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One matrix on a grid: weight_OI = (codes_OI - zero_OG) x scale_OG, each zero and scale repeated over its group."""

    codes_OI: torch.Tensor
    """int8, or float8_e4m3fn on a floating-point grid."""
    scale_OG: torch.Tensor
    """float16, or float32 on a floating-point grid; positive, but where the format says `signed_scale`."""
    zero_OG: torch.Tensor | None = None
    """int8, the code of zero; None = 0, the grid is symmetric."""
    input_scale: torch.Tensor | None = None
    """float32 [1], the frozen step of the layer's input, where the format has one."""

    def to(self, device: torch.device) -> "QuantizedTensor":
        """Return the matrix on a device."""
        there = [None if it is None else it.to(device) for it in (self.zero_OG, self.input_scale)]
        return QuantizedTensor(self.codes_OI.to(device), self.scale_OG.to(device), *there)

    def split(self, heights: Sequence[int]) -> list["QuantizedTensor"]:
        """Return the matrices of `heights` outputs each that lie one below the other in this one."""
        zeros = [None] * len(heights) if self.zero_OG is None else self.zero_OG.split(list(heights))
        pieces = zip(self.codes_OI.split(list(heights)), self.scale_OG.split(list(heights)), zeros, strict=True)
        return [QuantizedTensor(codes, scale, zero, self.input_scale) for codes, scale, zero in pieces]


def join(pieces: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return matrices one below the other as one. Law: `join(t.split(heights)) == t`."""
    zeros = [piece.zero_OG for piece in pieces if piece.zero_OG is not None]
    codes_OI, scale_OG = torch.cat([piece.codes_OI for piece in pieces]), torch.cat([piece.scale_OG for piece in pieces])
    return QuantizedTensor(codes_OI, scale_OG, torch.cat(zeros) if zeros else None, pieces[0].input_scale)


def storable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales as `dtype` holds them: signs stay, none is nearer to zero than its smallest normal number or infinite."""
    limits = torch.finfo(dtype)
    return scale.abs().clamp(limits.smallest_normal, limits.max).copysign(scale).to(dtype)


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
        """Return whether weights become codes with scales; False for plain floating point."""

    @property
    def symmetric(self) -> bool:
        """Return whether zero is code 0; else every group has a zero point."""

    @property
    def signed_scale(self) -> bool:
        """Return whether a scale may be negative, which gives positive weights the side of the grid that is a step longer."""

    @property
    def code_dtype(self) -> torch.dtype:
        """Return the type of a code: int8, or float8_e4m3fn."""

    @property
    def scale_dtype(self) -> torch.dtype: ...
    @property
    def storage(self) -> str:
        """Return the layout of `formats/storage.py`, under the name that compressed-tensors gives it; `plain` has no codes."""

    @property
    def activation(self) -> Activation | None:
        """Return how the layer's input is rounded; None = not at all."""

    @property
    def scanned(self) -> bool:
        """Return whether every sensitivity pass measures the format; others are measured when a recipe asks for them."""

    @property
    def weights_as(self) -> str:
        """Return the format that stores the same weights without rounding inputs, or with steps found on the spot."""

    def check(self, out_features: int, in_features: int) -> str | None:
        """Return why a matrix of this shape cannot be stored so, or None. Costs no arithmetic on weights."""

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of payload and scales as stored."""

    def quantize(
        self, weight_OI: torch.Tensor, scale_OG: torch.Tensor | None = None, zero_OG: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Round to nearest on the grid that `scale_OG` and `zero_OG` give, by default the one that spans all weights.

        Raises:
            UnsupportedError: the format has no grid, or the shape does not fit.
        """

    def nearest_codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        """Return the grid's closest codes less `zero` to values of any shape, as floats: value = result x scale.

        `scale` and `zero` broadcast against the values.

        Raises:
            UnsupportedError: the format has no grid.
        """

    def dequantize(self, tensor: QuantizedTensor) -> torch.Tensor:
        """Return the float32 weight [O, I] that the codes stand for."""

    def round_trip(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the float32 weight [O, I] as it comes back after round-to-nearest storage."""
