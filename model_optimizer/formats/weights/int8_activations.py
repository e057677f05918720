"""W8A8: weights as in int8-channel, stored one byte each, and inputs rounded to 8 bits too, so that products are integer.

With a step per token found on the spot, or with one per tensor that was frozen from calibration text.
Source: the schemes W8A8 of compressed-tensors.
"""

from model_optimizer.formats.registry import FORMATS
from model_optimizer.formats.weights.integer import SymmetricInteger

for entry in (
    SymmetricInteger("w8a8-int8", 8, storage="int-quantized", activation="dynamic-token", shares="int8-channel"),
    SymmetricInteger("w8a8-int8-static", 8, storage="int-quantized", activation="static-tensor", shares="int8-channel"),
):
    FORMATS.register(entry.name)(entry)
