"""One matrix product, weights dense or packed: the seam where kernels for packed weights plug in.

Shape letters: T tokens, I input features, O output features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from model_optimizer.formats.activations import round_activation
from model_optimizer.formats.base import WeightFormat
from model_optimizer.registry import Registry


class Linear(Protocol):
    """y = x W^T + b."""

    def __call__(self, input_TI: torch.Tensor) -> torch.Tensor:
        """Return [T, O]."""

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix as the checkpoint stores it: codes, scales, zero points by suffix."""

    weight_format: WeightFormat
    parts: Mapping[str, torch.Tensor]


class PackedLinearKernel(Protocol):
    """How packed weights are multiplied; one file of `linears/` each. Inputs are already rounded where the format says so."""

    def __call__(self, input_TI: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Return x W^T, [T, O] in the input's dtype."""


PACKED_LINEARS: Registry[PackedLinearKernel] = Registry("packed linear kernel", "model_optimizer.runtimes.torch.linears")


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Weights in the compute dtype; the input is rounded first where the checkpoint says so."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None = None
    rounding: WeightFormat | None = None
    input_scale: torch.Tensor | None = None

    def __call__(self, input_TI: torch.Tensor) -> torch.Tensor:
        if self.rounding is not None:
            input_TI = round_activation(input_TI, self.rounding, self.input_scale)
        return functional.linear(input_TI, self.weight_OI, self.bias_O)

    @property
    def num_bytes(self) -> int:
        return self.weight_OI.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights as stored, multiplied by a kernel of the registry."""

    weight: PackedWeight
    kernel: PackedLinearKernel
    bias_O: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    def __call__(self, input_TI: torch.Tensor) -> torch.Tensor:
        rounded_TI = round_activation(input_TI, self.weight.weight_format, self.input_scale)
        output_TO = self.kernel(rounded_TI, self.weight)
        return output_TO if self.bias_O is None else output_TO + self.bias_O

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.weight.parts.values()) + (0 if self.bias_O is None else self.bias_O.nbytes)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several linears over one input whose outputs lie one after the other."""

    pieces: tuple[Linear, ...]

    def __call__(self, input_TI: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece(input_TI) for piece in self.pieces], dim=-1)

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def laid_out(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the weight in the memory order that its device multiplies fastest; the same values, the same bytes.

    Source: float32 on one AVX2 core, [T, 576] x [576, 3072] in milliseconds, rows one after the other against inputs one after
    the other: 0.29 and 0.29 at T = 1, 0.86 and 0.37 at 8, 0.90 and 0.58 at 16, 1.99 and 1.59 at 64.
    """
    return weight_OI.t().contiguous().t() if weight_OI.device.type == "cpu" else weight_OI.contiguous()


def side_by_side(pieces: Sequence[Linear]) -> Linear:
    """Return one linear for several over the same input: one matrix where all are dense and round alike."""
    dense = [piece for piece in pieces if isinstance(piece, DenseLinear) and piece.rounding is None]
    biases = [piece.bias_O for piece in dense if piece.bias_O is not None]
    if len(dense) < len(pieces) or len(biases) not in (0, len(pieces)):
        return SideBySide(tuple(pieces))
    weight_OI = torch.cat([piece.weight_OI for piece in dense])
    return DenseLinear(laid_out(weight_OI), torch.cat(biases) if biases else None)
