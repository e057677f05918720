"""FP8: weights in float8_e4m3fn with one float32 scale per output, inputs rounded to the same type.

    scale = absmax of the row / 448,  code = w / scale in float8_e4m3fn

The error is relative: at most 1/16 of a weight, or 2^-10 of the scale where the code is subnormal. Scales are float32,
because float16 has no normal number for rows below 0.027.
Source: OCP 8-bit floating point specification (E4M3); the schemes FP8 and FP8_DYNAMIC of compressed-tensors.
"""

from dataclasses import dataclass

import torch

from model_optimizer.formats.base import Activation, QuantizedTensor
from model_optimizer.formats.registry import FORMATS
from model_optimizer.formats.storage import stored_bytes
from model_optimizer.formats.weights.integer import refuse_unfit

LARGEST_CODE = 448.0
SMALLEST_SCALE = 2.0**-100
"""What a row of zeros gets."""


@dataclass(frozen=True, slots=True)
class Float8:
    """Codes of type float8_e4m3fn, one float32 scale per output."""

    name: str
    activation: Activation | None
    bits: int = 8
    group_size: int | None = None
    storage: str = "float-quantized"
    scanned: bool = False
    on_grid: bool = True
    symmetric: bool = True
    signed_scale: bool = False
    code_dtype: torch.dtype = torch.float8_e4m3fn
    scale_dtype: torch.dtype = torch.float32

    @property
    def weights_as(self) -> str:
        return "fp8-dynamic"

    def check(self, out_features: int, in_features: int) -> str | None:
        return None

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return stored_bytes(self, out_features, in_features)

    def quantize(
        self, weight_OI: torch.Tensor, scale_OG: torch.Tensor | None = None, zero_OG: torch.Tensor | None = None
    ) -> QuantizedTensor:
        refuse_unfit(self.name, None, weight_OI)
        if scale_OG is None:
            scale_OG = weight_OI.float().abs().amax(1, keepdim=True).div_(LARGEST_CODE).clamp_min_(SMALLEST_SCALE)
        codes_OI = self.nearest_codes(weight_OI.float(), scale_OG.float())
        return QuantizedTensor(codes_OI.to(torch.float8_e4m3fn), scale_OG.float())

    def nearest_codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        return (values / scale).clamp_(-LARGEST_CODE, LARGEST_CODE).to(torch.float8_e4m3fn).float()

    def dequantize(self, tensor: QuantizedTensor) -> torch.Tensor:
        return tensor.codes_OI.float() * tensor.scale_OG

    def round_trip(self, weight_OI: torch.Tensor) -> torch.Tensor:
        return self.dequantize(self.quantize(weight_OI))


for entry in (Float8("fp8-dynamic", "dynamic-token"), Float8("fp8-static", "static-tensor")):
    FORMATS.register(entry.name)(entry)
