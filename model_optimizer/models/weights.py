"""Weights one tensor at a time, so that no caller holds a whole model; on the CPU in their stored type."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from model_optimizer.models.headers import TensorHeader

if TYPE_CHECKING:
    import torch


def read_tensor(header: TensorHeader) -> "torch.Tensor":
    """Return one tensor."""
    from safetensors import safe_open

    with safe_open(header.file, framework="pt") as shard:
        tensor: torch.Tensor = shard.get_tensor(header.name)
    return tensor


def read_rows(header: TensorHeader, num_rows: int) -> "torch.Tensor":
    """Return the first `num_rows` rows (or all, where there are fewer) of a matrix; the rest is not read."""
    from safetensors import safe_open

    with safe_open(header.file, framework="pt") as shard:
        rows: torch.Tensor = shard.get_slice(header.name)[:num_rows]
    return rows


def iterate_tensors(headers: Collection[TensorHeader]) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield (name, tensor) of every header, opening each shard once."""
    from safetensors import safe_open

    for file in sorted({header.file for header in headers}):
        with safe_open(file, framework="pt") as shard:
            for header in headers:
                if header.file == file:
                    yield header.name, shard.get_tensor(header.name)
