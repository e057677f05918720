"""Plain torch: unpack the whole matrix, multiply, forget it. Right everywhere; every use reads and writes the weights anew."""

import torch
from torch.nn import functional

from model_optimizer.formats.storage import from_parts
from model_optimizer.runtimes.torch.linear import PACKED_LINEARS, PackedWeight


def multiply_unpacked(input_TI: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Return x W^T with W in the input's dtype, [T, O]."""
    weight_OI = weight.weight_format.dequantize(from_parts(weight.weight_format, weight.parts))
    return functional.linear(input_TI, weight_OI.to(input_TI.dtype))


PACKED_LINEARS.register("unpacking")(multiply_unpacked)
