"""Weights one tensor at a time, so that no caller holds a whole model; on the CPU in their stored type."""

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from model_optimizer.errors import ConfigError
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


_EXPONENT = {"F64": 0x7FF0000000000000, "F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
"""All ones here means NaN or infinity. Source: IEEE 754-2019, section 3.4; bfloat16 is the upper half of F32."""
_WORD = {"F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2"}
_BLOCK = 1 << 22


def refuse_not_finite(headers: Iterable[TensorHeader]) -> None:
    """Look at every weight once; torch is not loaded, and no tensor is held.

    Raises:
        ConfigError: names the first tensor with NaN or infinite values, and how many it has.
    """
    for header in headers:
        if header.dtype in _WORD and (count := num_not_finite(header)):
            raise ConfigError(
                f"{header.file}: {header.name} holds {count} NaN or infinite values of {header.num_parameters}; "
                "found when the source was read, before the first stage; the model is damaged, fetch or train it again"
            )


def num_not_finite(header: TensorHeader) -> int:
    """Return how many values of a floating-point tensor are NaN or infinite."""
    if not header.num_bytes:
        return 0
    mask = np.array(_EXPONENT[header.dtype], dtype=_WORD[header.dtype])
    bytes_N = np.memmap(header.file, mode="r", dtype=np.uint8, offset=header.start, shape=(header.num_bytes,))
    words_N = bytes_N.view(_WORD[header.dtype])
    return sum(
        int(np.count_nonzero((words_N[start : start + _BLOCK] & mask) == mask)) for start in range(0, len(words_N), _BLOCK)
    )
