"""F32 and F16: weights as they are; norms, biases, and rows that no block fits."""

import numpy as np

from model_optimizer.formats.gguf.base import BlockFormat, Bytes, Floats
from model_optimizer.formats.gguf.registry import BLOCKS


def _encode_f32(blocks_NK: Floats, importance_NK: Floats) -> Bytes:
    return blocks_NK.astype("<f4").view(np.uint8)


def _decode_f32(stored_NB: Bytes) -> Floats:
    return stored_NB.view("<f4").astype(np.float32)


def _encode_f16(blocks_NK: Floats, importance_NK: Floats) -> Bytes:
    return blocks_NK.astype("<f2").view(np.uint8)


def _decode_f16(stored_NB: Bytes) -> Floats:
    return stored_NB.view("<f2").astype(np.float32)


for entry in (
    BlockFormat("F32", number=0, block_size=1, block_bytes=4, encode=_encode_f32, decode=_decode_f32),
    BlockFormat("F16", number=1, block_size=1, block_bytes=2, encode=_encode_f16, decode=_decode_f16),
):
    BLOCKS.register(entry.name)(entry)
