"""Codes around zero with one scale: weight = scale x code, codes -half .. half - 1, 16 or 32 weights to a scale.

    scale* = sum(w x q) / sum(w q^2) for given codes q; the error it leaves is sum(w x^2) - sum(w x q)^2 / sum(w q^2)

Several roundings of the same weights are tried, and the one that leaves the least error is kept.

Shape letters: K weights of a sub-block (first, so that sums run along contiguous memory), S sub-blocks.
"""

import numpy as np

from model_optimizer.formats.gguf.base import Bytes, Floats, from_half, inverse
from model_optimizer.formats.gguf.base import half as half_bytes

STEPS = np.linspace(-1.0, 1.0, 17, dtype=np.float32)
"""Codes by which the grid's end is moved from the largest weight. Source: llama.cpp, make_qx_quants tries -0.9 .. 0.9."""


def best_scale(weight_KS: Floats, importance_KS: Floats, half: int) -> Floats:
    """Return per sub-block the scale of least importance-weighted squared error; signed, 0 for a sub-block of zeros."""
    peak_S = np.take_along_axis(weight_KS, np.abs(weight_KS).argmax(0)[None], 0)[0]
    inverse_S = -inverse(peak_S)
    weighted_KS = importance_KS * weight_KS
    best_S, gain_S = np.zeros_like(peak_S), np.full_like(peak_S, -1)
    for step in STEPS:
        codes_KS = np.clip(np.rint(weight_KS * ((half + step) * inverse_S)), -half, half - 1)
        cross_S = (weighted_KS * codes_KS).sum(0)
        square_S = (importance_KS * codes_KS * codes_KS).sum(0)
        scale_S = cross_S * inverse(square_S)
        better_S = cross_S * scale_S > gain_S
        gain_S = np.where(better_S, cross_S * scale_S, gain_S)
        best_S = np.where(better_S, scale_S, best_S)
    found_S: Floats = best_S
    return found_S


def codes_of(weight_KS: Floats, scale_S: Floats, half: int) -> Floats:
    """Return the nearest codes."""
    codes_KS: Floats = np.clip(np.rint(weight_KS * inverse(scale_S)), -half, half - 1)
    return codes_KS


def error_of(weight_KS: Floats, importance_KS: Floats, scale_S: Floats, half: int) -> Floats:
    """Return the importance-weighted squared error per sub-block when it is rounded to this scale."""
    missed_KS = weight_KS - codes_of(weight_KS, scale_S, half) * scale_S
    missed_KS *= missed_KS
    missed_KS *= importance_KS
    error_S: Floats = missed_KS.sum(0)
    return error_S


def scale_and_codes(blocks_NK: Floats, importance_NK: Floats, half: int) -> tuple[Floats, Bytes]:
    """Return float32 scale [N, 1] and codes plus `half` [N, K] of blocks with one scale each.

    Where all weights of a block matter alike the scale is -peak / half, as in ggml's reference; else it is searched for.
    """
    peak_N1 = np.take_along_axis(blocks_NK, np.abs(blocks_NK).argmax(1, keepdims=True), 1)
    scale_N1 = peak_N1 / np.float32(-half)
    if (importance_NK != importance_NK[:, :1]).any():
        found_N = best_scale(np.ascontiguousarray(blocks_NK.T), np.ascontiguousarray(importance_NK.T), half)
        scale_N1 = from_half(half_bytes(found_N))
    codes_NK = np.trunc(blocks_NK * inverse(scale_N1) + np.float32(half + 0.5)).clip(0, 2 * half - 1)
    return scale_N1, codes_NK.astype(np.uint8)
