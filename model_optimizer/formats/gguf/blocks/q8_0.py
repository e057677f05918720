"""Q8_0: 32 weights to a float16 scale, codes -127 .. 127; weight = d x code, d = absmax / 127.

Source: ggml-quants.c, quantize_row_q8_0_ref; halves are rounded away from zero. Importance is not used.
"""

import numpy as np

from model_optimizer.formats.gguf.base import BlockFormat, Bytes, Floats, from_half, half, inverse
from model_optimizer.formats.gguf.registry import BLOCKS


def encode(blocks_NK: Floats, importance_NK: Floats) -> Bytes:
    d_N1 = np.abs(blocks_NK).max(1, keepdims=True) / np.float32(127)
    scaled_NK = blocks_NK * inverse(d_N1)
    whole_NK = np.floor(np.abs(scaled_NK))
    rounded_NK = whole_NK + np.floor(2 * (np.abs(scaled_NK) - whole_NK))
    codes_NK = (np.sign(scaled_NK) * rounded_NK).astype(np.int8)
    return np.concatenate([half(d_N1), codes_NK.view(np.uint8)], axis=1)


def decode(stored_NB: Bytes) -> Floats:
    return stored_NB[:, 2:].view(np.int8).astype(np.float32) * from_half(stored_NB[:, :2])


BLOCKS.register("Q8_0")(BlockFormat("Q8_0", number=8, block_size=32, block_bytes=34, encode=encode, decode=decode))
