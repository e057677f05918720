"""Rounding that is learned block by block (block_tuning.py); a layer by itself is rounded to nearest, where learning starts."""

from model_optimizer.quantization.methods.rtn import RoundToNearest
from model_optimizer.quantization.registry import METHODS

METHODS.register("signround")(RoundToNearest())
