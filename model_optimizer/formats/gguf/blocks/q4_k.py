"""Q4_K: 256 weights, 4-bit codes, 6-bit scales and offsets per 32; 4.5 bits a weight."""

import numpy as np

from model_optimizer.formats.gguf.affine import GROUPS, SUB, SUPER, decode_affine, encode_affine
from model_optimizer.formats.gguf.base import BlockFormat, Bytes, Floats
from model_optimizer.formats.gguf.registry import BLOCKS

HEAD = 16


def encode(blocks_NK: Floats, importance_NK: Floats) -> Bytes:
    head_NB, codes_NGK = encode_affine(blocks_NK, importance_NK, 15)
    pairs = codes_NGK.reshape(-1, GROUPS // 2, 2, SUB)
    return np.concatenate([head_NB, (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(len(head_NB), -1)], axis=1)


def decode(stored_NB: Bytes) -> Floats:
    words = stored_NB[:, HEAD:].reshape(-1, GROUPS // 2, SUB)
    return decode_affine(stored_NB[:, :HEAD], np.stack([words & 15, words >> 4], axis=2).reshape(-1, GROUPS, SUB))


BLOCKS.register("Q4_K")(BlockFormat("Q4_K", number=12, block_size=SUPER, block_bytes=144, encode=encode, decode=decode))
