"""Q5_K: 256 weights, 5-bit codes, 6-bit scales and offsets per 32; 5.5 bits a weight.

The fifth bit of code k of sub-block g is bit g of byte k of a plane of 32 bytes.
"""

import numpy as np

from model_optimizer.formats.gguf.affine import GROUPS, SUB, SUPER, decode_affine, encode_affine
from model_optimizer.formats.gguf.base import BlockFormat, Bytes, Floats
from model_optimizer.formats.gguf.registry import BLOCKS

HEAD = 16


def encode(blocks_NK: Floats, importance_NK: Floats) -> Bytes:
    head_NB, codes_NGK = encode_affine(blocks_NK, importance_NK, 31)
    plane_NK = np.packbits(codes_NGK >> 4, axis=1, bitorder="little").reshape(-1, SUB)
    pairs = (codes_NGK & 15).reshape(-1, GROUPS // 2, 2, SUB)
    return np.concatenate([head_NB, plane_NK, (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(len(head_NB), -1)], axis=1)


def decode(stored_NB: Bytes) -> Floats:
    fifth_NGK = np.unpackbits(stored_NB[:, None, HEAD : HEAD + SUB], axis=1, bitorder="little")
    words = stored_NB[:, HEAD + SUB :].reshape(-1, GROUPS // 2, SUB)
    codes_NGK = np.stack([words & 15, words >> 4], axis=2).reshape(-1, GROUPS, SUB)
    return decode_affine(stored_NB[:, :HEAD], codes_NGK | (fifth_NGK << 4))


BLOCKS.register("Q5_K")(BlockFormat("Q5_K", number=13, block_size=SUPER, block_bytes=176, encode=encode, decode=decode))
