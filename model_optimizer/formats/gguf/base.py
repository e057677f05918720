"""What a GGUF block type is: rows of weights in, bytes out, and back. Knows neither models nor files.

A row of I weights is cut into blocks of K; every block is stored in B bytes, by itself.

Shape letters: R rows, I input features, N blocks, K weights of a block, B bytes of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import UnsupportedError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
PIECE_WEIGHTS = 1 << 16
"""Weights that are quantized together: what a search keeps of them fits the second-level cache."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One block type, by the name and number that ggml gives it."""

    name: str
    number: int
    """Source: ggml.h, enum ggml_type."""
    block_size: int
    block_bytes: int
    encode: Callable[[Floats, Floats], Bytes]
    """(blocks [N, K], importance [N, K]) -> bytes [N, B]."""
    decode: Callable[[Bytes], Floats]
    """Bytes [N, B] -> blocks [N, K]."""

    def check(self, in_features: int) -> str | None:
        """Return why rows of this width cannot be stored so, or None."""
        remainder = in_features % self.block_size
        return f"row width {in_features} is not divisible by {self.block_size} (remainder {remainder})" if remainder else None

    def row_bytes(self, in_features: int) -> int:
        """Return the bytes of one row."""
        return in_features // self.block_size * self.block_bytes

    def quantize(self, weight_RI: Floats, importance_I: Floats | None = None) -> Bytes:
        """Return the rows as bytes [R, row bytes].

        `importance_I` weighs the squared error of each input (the diagonal of its second moment); None weighs all alike.

        Raises:
            UnsupportedError: the width does not fit, or a value is not finite.
        """
        num_rows, width = weight_RI.shape
        if reason := self.check(width):
            raise UnsupportedError(f"{self.name}: {reason}; choose a type with smaller blocks")
        if not np.isfinite(weight_RI).all():
            raise UnsupportedError(f"{self.name}: a weight is not finite; mend the source checkpoint")
        stored_RB = np.empty((num_rows, self.row_bytes(width)), dtype=np.uint8)
        step = max(1, PIECE_WEIGHTS // max(1, width))
        for start in range(0, num_rows, step):
            rows_RI = np.ascontiguousarray(weight_RI[start : start + step], dtype=np.float32)
            importance_RI = np.broadcast_to(np.float32(1) if importance_I is None else importance_I, rows_RI.shape)
            blocks_NK, importance_NK = (it.reshape(-1, self.block_size) for it in (rows_RI, importance_RI))
            stored_RB[start : start + step] = self.encode(blocks_NK, importance_NK).reshape(len(rows_RI), -1)
        return stored_RB

    def dequantize(self, stored_RB: Bytes) -> Floats:
        """Return the float32 rows that the bytes stand for."""
        return self.decode(np.ascontiguousarray(stored_RB).reshape(-1, self.block_bytes)).reshape(len(stored_RB), -1)


def half(values_N: Floats) -> Bytes:
    """Return values as the two bytes of their float16, [N, 2]."""
    return values_N.astype("<f2").reshape(-1, 1).view(np.uint8)


def from_half(bytes_N2: Bytes) -> Floats:
    """Return the float32 [N, 1] of two stored bytes."""
    return np.ascontiguousarray(bytes_N2).view("<f2").astype(np.float32)


def inverse(values: Floats) -> Floats:
    """Return 1 / value, and 0 for 0."""
    with np.errstate(divide="ignore"):
        return np.where(values == 0, np.float32(0), np.float32(1) / values).astype(np.float32)
