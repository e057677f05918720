"""Codes with a scale and an offset in super-blocks of 256: Q4_K and Q5_K.

    weight = (d x s) x code - (dmin x m)     code 0 .. top; s and m are 6-bit numbers per 32 weights; d, dmin float16 per 256

Per sub-block several roundings are tried, and scale and offset solved by weighted least squares for each; then the 6-bit
numbers are chosen by the error that is really stored, not by the nearest value.

Shape letters: N super-blocks, G = 8 sub-blocks of one, S = N x G sub-blocks, K = 32 weights of a sub-block (first, so that
sums run along contiguous memory), B bytes.
"""

from itertools import product

import numpy as np

from model_optimizer.formats.gguf.base import Bytes, Floats, from_half, half, inverse

SUPER, GROUPS, SUB = 256, 8, 32
SCALE_BYTES = 12
LARGEST = 63
"""Largest 6-bit number."""
STEPS = np.linspace(-1.0, 1.0, 15, dtype=np.float32)
"""Codes by which the grid's end is moved from the largest weight. Source: llama.cpp, make_qkx2_quants tries -1 .. 1."""
SINGULAR = np.float32(1e-6)
"""Share of its terms below which a float32 determinant is taken for 0: all codes of the sub-block are the same."""
NEAR = tuple(product((0, -1, 1), repeat=2))
"""Neighbours of a pair of 6-bit numbers, itself first."""


def encode_affine(blocks_NK: Floats, importance_NK: Floats, top: int) -> tuple[Bytes, Bytes]:
    """Return the 16 head bytes [N, 16] (d, dmin, packed 6-bit numbers) and the codes [N, G, 32] of super-blocks [N, 256]."""
    weight_KS = np.ascontiguousarray(blocks_NK.reshape(-1, SUB).T)
    importance_KS = np.ascontiguousarray(importance_NK.reshape(-1, SUB).T)
    scale_NG, low_NG = (it.reshape(-1, GROUPS) for it in _search(weight_KS, importance_KS, top))
    d_N1, dmin_N1 = (from_half(half(it.max(1) / LARGEST)) for it in (scale_NG, low_NG))
    s_NG, m_NG = _nearest(scale_NG, d_N1), _nearest(low_NG, dmin_N1)
    best_S = np.full(weight_KS.shape[1], np.inf, dtype=np.float32)
    chosen_s_S, chosen_m_S = s_NG.reshape(-1), m_NG.reshape(-1)
    for by_s, by_m in NEAR:
        tried_s_NG, tried_m_NG = (np.clip(it + by, 0, LARGEST) for it, by in ((s_NG, by_s), (m_NG, by_m)))
        scale_S, low_S = (d_N1 * tried_s_NG).reshape(-1), (dmin_N1 * tried_m_NG).reshape(-1)
        missed_KS = weight_KS - (_codes(weight_KS, scale_S, low_S, top) * scale_S - low_S)
        error_S = (importance_KS * missed_KS * missed_KS).sum(0)
        better_S = error_S < best_S
        best_S = np.where(better_S, error_S, best_S)
        chosen_s_S = np.where(better_S, tried_s_NG.reshape(-1), chosen_s_S)
        chosen_m_S = np.where(better_S, tried_m_NG.reshape(-1), chosen_m_S)
    s_NG, m_NG = chosen_s_S.reshape(-1, GROUPS), chosen_m_S.reshape(-1, GROUPS)
    codes_KS = _codes(weight_KS, (d_N1 * s_NG).reshape(-1), (dmin_N1 * m_NG).reshape(-1), top)
    head_NB = np.concatenate([half(d_N1), half(dmin_N1), pack_six_bits(s_NG.astype(np.uint8), m_NG.astype(np.uint8))], axis=1)
    return head_NB, codes_KS.T.astype(np.uint8).reshape(-1, GROUPS, SUB)


def decode_affine(head_NB: Bytes, codes_NGK: Bytes) -> Floats:
    """Return the super-blocks [N, 256] of 16 head bytes and codes [N, G, 32]."""
    s_NG, m_NG = unpack_six_bits(head_NB[:, 4:])
    scale_NG1 = (from_half(head_NB[:, :2]) * s_NG.astype(np.float32))[..., None]
    low_NG1 = (from_half(head_NB[:, 2:4]) * m_NG.astype(np.float32))[..., None]
    return (scale_NG1 * codes_NGK.astype(np.float32) - low_NG1).reshape(-1, SUPER)


def _search(weight_KS: Floats, importance_KS: Floats, top: int) -> tuple[Floats, Floats]:
    """Return scale and offset (how far zero lies above code 0) of least weighted squared error; neither is negative."""
    least_S = np.minimum(weight_KS.min(0), 0)
    span_inverse_S = inverse(weight_KS.max(0) - least_S)
    weighted_KS = importance_KS * weight_KS
    sum_w_S, sum_x_S = importance_KS.sum(0), weighted_KS.sum(0)
    scale_best_S, low_best_S = np.zeros_like(sum_w_S), -least_S
    error_best_S = sum_w_S * np.float32(np.inf)
    for step in STEPS:
        codes_KS = np.clip(np.rint((weight_KS - least_S) * ((top + step) * span_inverse_S)), 0, top)
        sum_q_S, sum_xq_S = (importance_KS * codes_KS).sum(0), (weighted_KS * codes_KS).sum(0)
        sum_qq_S = (importance_KS * codes_KS * codes_KS).sum(0)
        determinant_S = sum_w_S * sum_qq_S - sum_q_S * sum_q_S
        least_of_S = (sum_qq_S * sum_x_S - sum_q_S * sum_xq_S) * inverse(determinant_S)
        one_code_S = determinant_S <= SINGULAR * sum_w_S * sum_qq_S
        least_of_S = np.where(one_code_S, least_S, np.minimum(least_of_S, 0))  # an offset cannot lift
        scale_S = (sum_xq_S - least_of_S * sum_q_S) * inverse(sum_qq_S)
        # sum w (scale q + least - x)^2 without the constant sum w x^2
        error_S = scale_S * (scale_S * sum_qq_S + 2 * least_of_S * sum_q_S - 2 * sum_xq_S)
        error_S += least_of_S * (least_of_S * sum_w_S - 2 * sum_x_S)
        better_S = (error_S < error_best_S) & (scale_S >= 0)
        error_best_S = np.where(better_S, error_S, error_best_S)
        scale_best_S = np.where(better_S, scale_S, scale_best_S)
        low_best_S = np.where(better_S, -least_of_S, low_best_S)
    return scale_best_S, low_best_S


def _nearest(values_NG: Floats, unit_N1: Floats) -> Floats:
    numbers_NG: Floats = np.clip(np.rint(values_NG * inverse(unit_N1)), 0, LARGEST)
    return numbers_NG


def _codes(weight_KS: Floats, scale_S: Floats, low_S: Floats, top: int) -> Floats:
    codes_KS: Floats = np.clip(np.rint((weight_KS + low_S) * inverse(scale_S)), 0, top)
    return codes_KS


def pack_six_bits(s_NG: Bytes, m_NG: Bytes) -> Bytes:
    """Return 2 x 8 numbers of 6 bits in 12 bytes: the first four of each whole, the upper bits of the others above them.

    Source: ggml-quants.c, get_scale_min_k4.
    """
    first = [it[:, :4] | (it[:, 4:] >> 4 << 6) for it in (s_NG, m_NG)]
    return np.concatenate([*first, (s_NG[:, 4:] & 15) | (m_NG[:, 4:] << 4)], axis=1)


def unpack_six_bits(packed_NB: Bytes) -> tuple[Bytes, Bytes]:
    """Return s and m. Law: `unpack_six_bits(pack_six_bits(s, m)) == (s, m)` for numbers below 64."""
    s_first, m_first, rest = packed_NB[:, :4], packed_NB[:, 4:8], packed_NB[:, 8:]
    s_NG = np.concatenate([s_first & 63, (rest & 15) | (s_first >> 6 << 4)], axis=1)
    m_NG = np.concatenate([m_first & 63, (rest >> 4) | (m_first >> 6 << 4)], axis=1)
    return s_NG, m_NG
