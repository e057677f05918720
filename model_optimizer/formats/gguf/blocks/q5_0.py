"""Q5_0: 32 weights to a float16 scale, codes -16 .. 15 stored plus 16; weight = d x (code - 16).

The fifth bits of a block are the bits of one little-endian word. llama.cpp takes this type where Q4_K does not fit a row.
Source: ggml-quants.c, quantize_row_q5_0_ref. With importance d is searched for.
"""

import numpy as np

from model_optimizer.formats.gguf.base import BlockFormat, Bytes, Floats, from_half, half
from model_optimizer.formats.gguf.nibbles import pack_nibbles, unpack_nibbles
from model_optimizer.formats.gguf.registry import BLOCKS
from model_optimizer.formats.gguf.symmetric import scale_and_codes


def encode(blocks_NK: Floats, importance_NK: Floats) -> Bytes:
    d_N1, codes_NK = scale_and_codes(blocks_NK, importance_NK, 16)
    fifth_NB = np.packbits(codes_NK >> 4, axis=1, bitorder="little")
    return np.concatenate([half(d_N1), fifth_NB, pack_nibbles(codes_NK)], axis=1)


def decode(stored_NB: Bytes) -> Floats:
    fifth_NK = np.unpackbits(stored_NB[:, 2:6], axis=1, bitorder="little")
    codes_NK = unpack_nibbles(stored_NB[:, 6:]) | (fifth_NK << 4)
    return from_half(stored_NB[:, :2]) * (codes_NK.astype(np.float32) - 16)


BLOCKS.register("Q5_0")(BlockFormat("Q5_0", number=6, block_size=32, block_bytes=22, encode=encode, decode=decode))
