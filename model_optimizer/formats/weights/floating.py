"""Plain floating point: the layer is left as the source holds it."""

from dataclasses import dataclass

import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.base import Activation, QuantizedTensor
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION


@dataclass(frozen=True, slots=True)
class Floating:
    """IEEE floating point of `bits` bits, no scales. Bytes are counted at that width whatever the source's dtype is."""

    name: str
    bits: int
    group_size: int | None = None
    on_grid: bool = False
    symmetric: bool = True
    signed_scale: bool = False
    code_dtype: torch.dtype = torch.float32
    scale_dtype: torch.dtype = torch.float32
    storage: str = "plain"
    activation: Activation | None = None
    scanned: bool = False

    @property
    def weights_as(self) -> str:
        return self.name

    def check(self, out_features: int, in_features: int) -> str | None:
        return None

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return out_features * in_features * self.bits // 8

    def quantize(
        self, weight_OI: torch.Tensor, scale_OG: torch.Tensor | None = None, zero_OG: torch.Tensor | None = None
    ) -> QuantizedTensor:
        raise UnsupportedError(f"{self.name} has no grid; choose a format with one, e.g. int8-channel")

    def nearest_codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        raise UnsupportedError(f"{self.name} has no grid")

    def dequantize(self, tensor: QuantizedTensor) -> torch.Tensor:
        raise UnsupportedError(f"{self.name} has no grid")

    def round_trip(self, weight_OI: torch.Tensor) -> torch.Tensor:
        return weight_OI.float()


FORMATS.register(FULL_PRECISION)(Floating(FULL_PRECISION, bits=32))
