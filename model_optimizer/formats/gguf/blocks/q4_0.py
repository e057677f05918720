"""Q4_0: 32 weights to a float16 scale, codes -8 .. 7 stored plus 8; weight = d x (code - 8).

Without importance d = (largest weight by magnitude) / -8. Source: ggml-quants.c, quantize_row_q4_0_ref. With importance d is
searched for.
"""

import numpy as np

from model_optimizer.formats.gguf.base import BlockFormat, Bytes, Floats, from_half, half
from model_optimizer.formats.gguf.nibbles import pack_nibbles, unpack_nibbles
from model_optimizer.formats.gguf.registry import BLOCKS
from model_optimizer.formats.gguf.symmetric import scale_and_codes


def encode(blocks_NK: Floats, importance_NK: Floats) -> Bytes:
    d_N1, codes_NK = scale_and_codes(blocks_NK, importance_NK, 8)
    return np.concatenate([half(d_N1), pack_nibbles(codes_NK)], axis=1)


def decode(stored_NB: Bytes) -> Floats:
    return from_half(stored_NB[:, :2]) * (unpack_nibbles(stored_NB[:, 2:]).astype(np.float32) - 8)


BLOCKS.register("Q4_0")(BlockFormat("Q4_0", number=2, block_size=32, block_bytes=18, encode=encode, decode=decode))
