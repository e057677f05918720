"""Q6_K: 256 weights, codes -32 .. 31, int8 scales per 16, one float16 d; weight = d x scale x code; 6.5625 bits a weight.

Every scale is searched for, and its int8 number chosen by the error that is really stored.

Shape letters: N super-blocks, G = 16 sub-blocks of one, S = N x G sub-blocks, K = 16 weights of a sub-block, H halves of 128.
"""

import numpy as np

from model_optimizer.formats.gguf.base import BlockFormat, Bytes, Floats, from_half, half, inverse
from model_optimizer.formats.gguf.nibbles import LOW, UP
from model_optimizer.formats.gguf.registry import BLOCKS
from model_optimizer.formats.gguf.symmetric import best_scale, codes_of, error_of

SUPER, GROUPS, SUB = 256, 16, 16
LOW_BYTES, HIGH_BYTES = 128, 64
HALF = 32
SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)
"""Where the upper bits of four codes lie in their byte."""
NEAR = (0, -1, 1)
"""Neighbours of an int8 scale, itself first."""


def encode(blocks_NK: Floats, importance_NK: Floats) -> Bytes:
    weight_KS = np.ascontiguousarray(blocks_NK.reshape(-1, SUB).T)
    importance_KS = np.ascontiguousarray(importance_NK.reshape(-1, SUB).T)
    scale_NG = best_scale(weight_KS, importance_KS, HALF).reshape(-1, GROUPS)
    largest_N1 = np.take_along_axis(scale_NG, np.abs(scale_NG).argmax(1, keepdims=True), 1)
    d_N1 = from_half(half(largest_N1 / np.float32(-128)))
    number_NG = np.clip(np.rint(scale_NG * inverse(d_N1)), -128, 127)
    best_S = np.full(weight_KS.shape[1], np.inf, dtype=np.float32)
    chosen_S = number_NG.reshape(-1)
    for by in NEAR:
        tried_NG = np.clip(number_NG + by, -128, 127)
        error_S = error_of(weight_KS, importance_KS, (d_N1 * tried_NG).reshape(-1), HALF)
        better_S = error_S < best_S
        best_S = np.where(better_S, error_S, best_S)
        chosen_S = np.where(better_S, tried_NG.reshape(-1), chosen_S)
    number_NG = chosen_S.reshape(-1, GROUPS)
    codes_KS = codes_of(weight_KS, (d_N1 * number_NG).reshape(-1), HALF) + HALF
    low_NB, high_NB = _pack(codes_KS.T.astype(np.uint8).reshape(-1, SUPER))
    return np.concatenate([low_NB, high_NB, number_NG.astype(np.int8).view(np.uint8), half(d_N1)], axis=1)


def decode(stored_NB: Bytes) -> Floats:
    low_NB, high_NB, numbers_NB, d_NB = np.split(stored_NB, np.cumsum([LOW_BYTES, HIGH_BYTES, GROUPS]), axis=1)
    scale_NG1 = (from_half(d_NB) * numbers_NB.view(np.int8).astype(np.float32))[..., None]
    codes_NGK = _unpack(low_NB, high_NB).reshape(-1, GROUPS, SUB).astype(np.float32) - HALF
    return (scale_NG1 * codes_NGK).reshape(-1, SUPER)


def _pack(codes_NK: Bytes) -> tuple[Bytes, Bytes]:
    """Return lower nibbles and upper bit pairs. Source: ggml-quants.c, quantize_row_q6_K_ref.

    In each half of 128 codes, code i and code i + 64 share a byte of nibbles; codes i, i + 32, i + 64, i + 96 a byte of pairs.
    """
    low: Bytes = codes_NK.reshape(-1, 2, 2, 64) & LOW
    high: Bytes = codes_NK.reshape(-1, 2, 4, 32) >> UP
    pairs: Bytes = np.bitwise_or.reduce(high << SHIFTS[:, None], axis=2)
    nibbles: Bytes = low[:, :, 0] | (low[:, :, 1] << UP)
    return nibbles.reshape(-1, LOW_BYTES), pairs.reshape(-1, HIGH_BYTES)


def _unpack(low_NB: Bytes, high_NB: Bytes) -> Bytes:
    """Return the codes [N, 256]. Law: `_unpack(*_pack(codes)) == codes` for codes below 64."""
    low, high = low_NB.reshape(-1, 2, 64), high_NB.reshape(-1, 2, 32)
    nibbles = np.stack([low & LOW, low >> UP], axis=2).reshape(-1, SUPER)
    pairs = (high[:, :, None] >> SHIFTS[:, None] & np.uint8(3)).reshape(-1, SUPER)
    codes_NK: Bytes = nibbles | (pairs << UP)
    return codes_NK


BLOCKS.register("Q6_K")(BlockFormat("Q6_K", number=14, block_size=SUPER, block_bytes=210, encode=encode, decode=decode))
