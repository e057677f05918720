"""Four-bit codes of a 32-weight block in 16 bytes: the first half in the lower nibbles, the second in the upper ones."""

import numpy as np

from model_optimizer.formats.gguf.base import Bytes

HALF = 16
LOW, UP = np.uint8(15), np.uint8(4)
"""The mask of a lower nibble, and how far the upper one lies above it."""


def pack_nibbles(codes_N32: Bytes) -> Bytes:
    """Return 16 bytes per block; only the lowest four bits of a code are kept."""
    packed: Bytes = (codes_N32[:, :HALF] & LOW) | (codes_N32[:, HALF:] << UP)
    return packed


def unpack_nibbles(packed_NB: Bytes) -> Bytes:
    """Return the codes. Law: `unpack_nibbles(pack_nibbles(codes)) == codes` for codes below 16."""
    return np.concatenate([packed_NB & LOW, packed_NB >> UP], axis=1)
