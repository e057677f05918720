"""Integers with a zero point per group: the grid spans least to largest weight, zero included, wherever they lie.

    step = (max(w, 0) - min(w, 0)) / (2^b - 1) rounded up to float16,  zero = round(-2^(b-1) - min(w, 0) / step)
    w ~ (code - zero) x step,  codes and zeros in -2^(b-1) .. 2^(b-1) - 1

A whole zero point keeps 0 exact, and the span of 2^b - 1 steps leaves its rounding room: |w - restored| <= step / 2.
Source: the asymmetric scheme of compressed-tensors (calculate_qparams).
"""

from dataclasses import dataclass

import torch

from model_optimizer.formats.base import Activation, QuantizedTensor
from model_optimizer.formats.registry import FORMATS
from model_optimizer.formats.storage import stored_bytes
from model_optimizer.formats.weights.integer import check_group, in_groups, refuse_unfit, stored_step


@dataclass(frozen=True, slots=True)
class AsymmetricInteger:
    """Integer codes of `bits` bits, a float16 scale and a zero point of `bits` bits per `group_size` inputs of an output."""

    name: str
    bits: int
    group_size: int
    storage: str = "pack-quantized"
    activation: Activation | None = None
    scanned: bool = False
    on_grid: bool = True
    symmetric: bool = False
    signed_scale: bool = False
    code_dtype: torch.dtype = torch.int8
    scale_dtype: torch.dtype = torch.float16

    @property
    def weights_as(self) -> str:
        return self.name

    def check(self, out_features: int, in_features: int) -> str | None:
        return check_group(self.group_size, in_features)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return stored_bytes(self, out_features, in_features)

    def quantize(
        self, weight_OI: torch.Tensor, scale_OG: torch.Tensor | None = None, zero_OG: torch.Tensor | None = None
    ) -> QuantizedTensor:
        refuse_unfit(self.name, self.group_size, weight_OI)
        grouped_OGK = in_groups(weight_OI, self.group_size)
        lowest_OG, highest_OG = grouped_OGK.amin(-1).clamp_max(0), grouped_OGK.amax(-1).clamp_min(0)
        if scale_OG is None:
            scale_OG = stored_step(self.name, (highest_OG - lowest_OG) / (2**self.bits - 1))
        scale_OG = scale_OG.to(torch.float16)
        if zero_OG is None:
            half = 2 ** (self.bits - 1)
            zero_OG = torch.round(-half - lowest_OG / scale_OG.float()).clamp_(-half, half - 1).to(torch.int8)
        zero_OG1 = zero_OG.float()[..., None]
        codes_OGK = self.nearest_codes(grouped_OGK, scale_OG.float()[..., None], zero_OG1).add_(zero_OG1)
        return QuantizedTensor(codes_OGK.reshape(weight_OI.shape).to(torch.int8), scale_OG, zero_OG)

    def nearest_codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        half = 2 ** (self.bits - 1)
        assert zero is not None, f"{self.name} has a zero point per group, and the caller gave none"
        return torch.minimum(torch.maximum(torch.round(values / scale), -half - zero), half - 1 - zero)

    def dequantize(self, tensor: QuantizedTensor) -> torch.Tensor:
        assert tensor.zero_OG is not None, f"{self.name} has a zero point per group, and the tensor holds none"
        steps_OGK = in_groups(tensor.codes_OI, self.group_size) - tensor.zero_OG.float()[..., None]
        return (steps_OGK * tensor.scale_OG.float()[..., None]).reshape(tensor.codes_OI.shape)

    def round_trip(self, weight_OI: torch.Tensor) -> torch.Tensor:
        return self.dequantize(self.quantize(weight_OI))


for entry in (
    AsymmetricInteger("int4-g32-asym", bits=4, group_size=32),
    AsymmetricInteger("int4-g64-asym", bits=4, group_size=64),
    AsymmetricInteger("int4-g128-asym", bits=4, group_size=128),
):
    FORMATS.register(entry.name)(entry)
