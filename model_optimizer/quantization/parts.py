"""Finished layers of a quantization that is under way: one small file each, so that a kill loses at most the layer at hand."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from model_optimizer.formats.base import QuantizedTensor, WeightFormat
from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.layers import LinearLayer
from model_optimizer.store import write_atomically

DIGEST_BYTES = 32
"""A file ends with the sha256 of what stands before, for the disk may have lost a part of it."""

GroupMethod = Callable[[str, torch.Tensor, WeightFormat], QuantizedTensor]
"""(first layer of the group, weights of all its layers one below the other, format) -> codes and scales."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A folder of finished layers."""

    directory: Path

    def read(self, layer: str, format_name: str) -> QuantizedTensor | None:
        """Return a finished layer, or None where it is absent or damaged."""
        try:
            content = self._path(layer, format_name).read_bytes()
            if sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
                return None
            tensors = load(content[:-DIGEST_BYTES])
            return QuantizedTensor(tensors["codes"], tensors["scale"], tensors.get("zero"))
        except (FileNotFoundError, SafetensorError, KeyError):
            return None

    def write(self, layer: str, format_name: str, tensor: QuantizedTensor) -> None:
        """Keep a finished layer; it is durable on return."""
        content = {"codes": tensor.codes_OI.cpu().contiguous(), "scale": tensor.scale_OG.cpu().contiguous()}
        if tensor.zero_OG is not None:
            content["zero"] = tensor.zero_OG.cpu().contiguous()
        saved = save(content)
        write_atomically(self._path(layer, format_name), saved + sha256(saved).digest())

    def remove(self) -> None:
        """Delete them all."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, layer: str, format_name: str) -> Path:
        return self.directory / f"{layer}.{format_name}.part"


def alike(group: Sequence[LinearLayer], plan: Mapping[str, str]) -> Iterator[tuple[str, tuple[LinearLayer, ...]]]:
    """Yield (format name, layers) for every format with a grid that layers of a group are planned in."""
    for name in dict.fromkeys(plan[layer.name] for layer in group):
        if FORMATS.get(name).on_grid:
            yield name, tuple(layer for layer in group if plan[layer.name] == name)


def finish(
    parts: Parts, layers: Sequence[LinearLayer], format_name: str, read: Callable[[str], torch.Tensor], method: GroupMethod
) -> None:
    """Quantize layers that read one input as one matrix, because outputs do not depend on each other; finished ones stay.

    `read(layer)` gives a weight [O, I].
    """
    missing = [layer for layer in layers if parts.read(layer.name, format_name) is None]
    if not missing:
        return
    weight_OI = torch.cat([read(layer.name) for layer in layers])
    tensor = method(layers[0].name, weight_OI, FORMATS.get(format_name))
    for layer, piece in zip(layers, tensor.split([layer.out_features for layer in layers]), strict=True):
        if layer in missing:
            parts.write(layer.name, format_name, piece)
