"""Write safetensors shards of limited size piece by piece: no tensor is ever held whole, and each shard is hashed as it goes.

Types and shapes are stated beforehand, so that a shard's header is written first and its data follow in order.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from model_optimizer.disk import explained
from model_optimizer.models.headers import INDEX, ITEM_BITS, SINGLE
from model_optimizer.store import write_atomically

if TYPE_CHECKING:
    import torch

HEADER_ALIGNMENT = 8
"""Source: safetensors/src/tensor.rs, which pads the header with spaces to eight bytes."""


@dataclass(frozen=True, slots=True)
class StatedTensor:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


Pieces = Callable[[StatedTensor], Iterator[bytes | memoryview]]
"""Gives a tensor's bytes in order; called once per tensor, in shard order."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a checkpoint."""

    file: str
    tensors: tuple[StatedTensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def plan_shards(tensors: Sequence[StatedTensor], max_bytes: int) -> tuple[Shard, ...]:
    """Return shards that hold the tensors in order, each at most `max_bytes` of data; a larger tensor gets one to itself."""
    bins: list[list[StatedTensor]] = [[]]
    for tensor in tensors:
        if bins[-1] and sum(it.num_bytes for it in bins[-1]) + tensor.num_bytes > max_bytes:
            bins.append([])
        bins[-1].append(tensor)
    if len(bins) == 1:
        return (Shard(SINGLE, tuple(bins[0])),)
    return tuple(Shard(f"model-{at:05}-of-{len(bins):05}.safetensors", tuple(held)) for at, held in enumerate(bins, 1))


def write_shard(directory: Path, shard: Shard, pieces: Pieces) -> str:
    """Write a shard so that it is there whole or not at all; return its sha256.

    Raises:
        StorageError: the disk is full.
    """
    temporary = directory / f"{shard.file}.part"
    digest = hashlib.sha256()
    with explained(directory), temporary.open("wb") as stream:
        for piece in _content(shard, pieces):
            stream.write(piece)
            digest.update(piece)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(directory / shard.file)
    return digest.hexdigest()


def _content(shard: Shard, pieces: Pieces) -> Iterator[bytes | memoryview]:
    yield _header(shard)
    for tensor in shard.tensors:
        written = 0
        for piece in pieces(tensor):
            written += len(piece)
            yield piece
        assert written == tensor.num_bytes, f"{tensor.name} gave {written} bytes where {tensor.num_bytes} were stated"


def _header(shard: Shard) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in shard.tensors:
        end = position + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def as_bytes(tensor: "torch.Tensor") -> memoryview:
    """Return a tensor's values in storage order, without a copy where they are contiguous."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_index(directory: Path, shards: Sequence[Shard]) -> None:
    """Write the index of several shards; one shard needs none."""
    if len(shards) == 1:
        return
    weight_map: Mapping[str, str] = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    total = sum(shard.num_bytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_atomically(directory / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
