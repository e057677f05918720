"""A checkpoint, plain or compressed-tensors, tensor by tensor as the model asks: no shard is ever held whole.

Shape letters: O output features, I input features.
"""

from pathlib import Path

import torch

from model_optimizer.errors import IntegrityError
from model_optimizer.formats.compressed_tensors import read_checkpoint_headers, read_plan
from model_optimizer.formats.registry import FORMATS
from model_optimizer.formats.storage import from_parts, stored_parts
from model_optimizer.models.weights import read_tensor
from model_optimizer.runtimes.torch.config import NativeOptions
from model_optimizer.runtimes.torch.linear import PACKED_LINEARS, DenseLinear, Linear, PackedLinear, PackedWeight, laid_out

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SPARE = (".rotary_emb.inv_freq",)
"""Ends of tensors that old checkpoints hold and nobody needs."""
_NAMES_SHOWN = 8


class Checkpoint:
    """A checkpoint that is read once through: every tensor is asked for by name, and none may be left over."""

    def __init__(self, directory: Path, options: NativeOptions, device: torch.device):
        self._directory = directory
        self._options = options
        self._device = device
        self._dtype = DTYPES[options.dtype]
        self._headers = read_checkpoint_headers(directory)
        self._plan = read_plan(directory)
        self._unread = {name for name in self._headers if not name.endswith(_SPARE)}

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the reader of a report must know of how weights are held and inputs are rounded."""
        if not self._plan:
            return ()
        kernel = self._options.packed_linear
        held = (
            f"quantized weights stay packed and are multiplied by the kernel {kernel!r}"
            if self._options.keep_packed
            else f"quantized weights were unpacked to {self._options.dtype} at load"
        )
        rounds = any(FORMATS.get(name).activation for name in self._plan.values())
        rounding = f"inputs are rounded to 8 bits as the checkpoint says; products stay {self._options.dtype}"
        return (held, rounding) if rounds else (held,)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return one plain tensor on the device in the compute dtype.

        Raises:
            IntegrityError: it is missing or has another shape.
        """
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise IntegrityError(
                f"{self._directory}: {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}; make it again"
            )
        return tensor.to(self._device, self._dtype)

    def linear(self, layer: str, out_features: int, in_features: int, *, bias: bool) -> Linear:
        """Return one linear layer, whatever it is stored as.

        Raises:
            IntegrityError: a tensor of it is missing or has another shape.
        """
        bias_O = self.tensor(f"{layer}.bias", out_features) if bias else None
        if layer not in self._plan:
            return DenseLinear(laid_out(self.tensor(f"{layer}.weight", out_features, in_features)), bias_O)
        weight_format = FORMATS.get(self._plan[layer])
        suffixes = [part.suffix for part in stored_parts(weight_format, 1, 1)]
        packed = PackedWeight(weight_format, {suffix: self._read(layer + suffix).to(self._device) for suffix in suffixes})
        unpacked = from_parts(weight_format, packed.parts)
        if tuple(unpacked.codes_OI.shape) != (out_features, in_features):
            raise IntegrityError(
                f"{self._directory}: {layer} has shape {list(unpacked.codes_OI.shape)}, config.json asks for "
                f"{[out_features, in_features]}; make it again"
            )
        if self._options.keep_packed:
            return PackedLinear(packed, PACKED_LINEARS.get(self._options.packed_linear), bias_O, unpacked.input_scale)
        rounding = weight_format if weight_format.activation else None
        weight_OI = laid_out(weight_format.dequantize(unpacked).to(self._dtype))
        return DenseLinear(weight_OI, bias_O, rounding, unpacked.input_scale)

    def forget(self, name: str) -> None:
        """Leave a tensor unread, where there is one."""
        self._unread.discard(name)

    def refuse_rest(self) -> None:
        """Refuse a checkpoint that holds what nobody asked for.

        Raises:
            IntegrityError: lists it.
        """
        if self._unread:
            shown = ", ".join(sorted(self._unread)[:_NAMES_SHOWN])
            raise IntegrityError(f"{self._directory}: config.json explains {len(self._unread)} tensors not, e.g. {shown}")

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._headers:
            raise IntegrityError(f"{self._directory}: the tensor {name} is missing; restore the checkpoint or make it again")
        self._unread.discard(name)
        return read_tensor(self._headers[name])
