"""Symmetric integers with float16 scales: int8 per output channel, int6 to int2 in groups along the input.

The grid of b bits has codes -2^(b-1) .. 2^(b-1) - 1 and by default step absmax / (2^(b-1) - 1/2), so that the largest
magnitude is half a step from the outermost code on either side (the compressed-tensors convention). Methods that choose
scales may give a group a negative one, as Q4_0 of llama.cpp does: its outermost code then stands for a positive weight.
The scale is rounded up to float16: thus |w - dequantize(quantize(w))| <= scale / 2 holds for what is stored.
"""

from dataclasses import dataclass

import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.base import Activation, QuantizedTensor
from model_optimizer.formats.registry import FORMATS
from model_optimizer.formats.storage import stored_bytes

SMALLEST_SCALE = 2.0**-14
"""Smallest normal float16; below it a scale loses precision. Weights under half of it become zero."""
LARGEST_SCALE = 65504.0


@dataclass(frozen=True, slots=True)
class SymmetricInteger:
    """Integer codes of `bits` bits, one float16 scale per `group_size` inputs of an output (None = per channel)."""

    name: str
    bits: int
    group_size: int | None = None
    storage: str = "pack-quantized"
    activation: Activation | None = None
    shares: str | None = None
    """A format of the same weights that rounds no inputs."""
    on_grid: bool = True
    symmetric: bool = True
    code_dtype: torch.dtype = torch.int8
    scale_dtype: torch.dtype = torch.float16

    @property
    def scanned(self) -> bool:
        return self.activation is None

    @property
    def signed_scale(self) -> bool:
        return self.group_size is not None

    @property
    def weights_as(self) -> str:
        return self.shares or self.name

    def check(self, out_features: int, in_features: int) -> str | None:
        return check_group(self.group_size, in_features)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return stored_bytes(self, out_features, in_features)

    def quantize(
        self, weight_OI: torch.Tensor, scale_OG: torch.Tensor | None = None, zero_OG: torch.Tensor | None = None
    ) -> QuantizedTensor:
        refuse_unfit(self.name, self.group_size, weight_OI)
        grouped_OGK = in_groups(weight_OI, self.group_size)
        scale_OG = self._spanning_scale(grouped_OGK) if scale_OG is None else scale_OG.to(torch.float16)
        codes_OGK = self.nearest_codes(grouped_OGK, scale_OG.float()[..., None])
        return QuantizedTensor(codes_OGK.reshape(weight_OI.shape).to(torch.int8), scale_OG)

    def nearest_codes(self, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        half = 2 ** (self.bits - 1)
        return torch.round(values / scale).clamp_(-half, half - 1)

    def dequantize(self, tensor: QuantizedTensor) -> torch.Tensor:
        codes_OGK = in_groups(tensor.codes_OI, self.group_size)
        return (codes_OGK * tensor.scale_OG.float()[..., None]).reshape(tensor.codes_OI.shape)

    def round_trip(self, weight_OI: torch.Tensor) -> torch.Tensor:
        return self.dequantize(self.quantize(weight_OI))

    def _spanning_scale(self, grouped_OGK: torch.Tensor) -> torch.Tensor:
        """Return the smallest float16 step whose grid reaches every weight to half a step."""
        return stored_step(self.name, grouped_OGK.abs().amax(-1) / (2 ** (self.bits - 1) - 0.5))


def check_group(group_size: int | None, in_features: int) -> str | None:
    """Return why inputs cannot be cut into groups, or None."""
    if group_size is not None and (remainder := in_features % group_size):
        return f"in_features {in_features} is not divisible by group {group_size} (remainder {remainder})"
    return None


def refuse_unfit(name: str, group_size: int | None, weight_OI: torch.Tensor) -> None:
    """Refuse a weight that groups do not divide, or that is not finite.

    Raises:
        UnsupportedError: says which.
    """
    if reason := check_group(group_size, weight_OI.shape[1]):
        raise UnsupportedError(f"{name}: {reason}")
    if not torch.isfinite(weight_OI).all():
        raise UnsupportedError(f"{name}: the weight holds a value that is not finite; mend the source checkpoint")


def in_groups(matrix_OI: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """Return the float32 matrix as [O, G, inputs of a group]."""
    return matrix_OI.float().reshape(matrix_OI.shape[0], -1, group_size or matrix_OI.shape[1])


def stored_step(name: str, step_OG: torch.Tensor) -> torch.Tensor:
    """Return float32 steps rounded up to float16, none below its smallest normal.

    Raises:
        UnsupportedError: a step does not fit.
    """
    if step_OG.max() > LARGEST_SCALE:
        raise UnsupportedError(f"{name}: a scale of {step_OG.max():.3g} does not fit float16 (at most {LARGEST_SCALE})")
    step_OG = step_OG.clamp_min(SMALLEST_SCALE)
    scale_OG = step_OG.to(torch.float16)
    return torch.where(scale_OG.float() < step_OG, _next_larger(scale_OG), scale_OG)


def _next_larger(positive: torch.Tensor) -> torch.Tensor:
    """Return the next larger float16: the bit patterns of positive floats are ordered as the floats are.

    torch.nextafter says the same but has no float16 kernel on CUDA devices.
    """
    return (positive.view(torch.int16) + 1).view(torch.float16)


for entry in (
    SymmetricInteger("int8-channel", bits=8),
    SymmetricInteger("int2-g32", bits=2, group_size=32),
    SymmetricInteger("int2-g64", bits=2, group_size=64),
    SymmetricInteger("int3-g32", bits=3, group_size=32),
    SymmetricInteger("int3-g64", bits=3, group_size=64),
    SymmetricInteger("int4-g32", bits=4, group_size=32),
    SymmetricInteger("int4-g64", bits=4, group_size=64),
    SymmetricInteger("int4-g128", bits=4, group_size=128),
    SymmetricInteger("int5-g64", bits=5, group_size=64),
    SymmetricInteger("int6-g64", bits=6, group_size=64),
):
    FORMATS.register(entry.name)(entry)
