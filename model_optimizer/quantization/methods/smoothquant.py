"""Rounding of SmoothQuant: to nearest, once outliers of activations were folded into weights (transforms/smoothquant.py)."""

from model_optimizer.quantization.methods.rtn import RoundToNearest
from model_optimizer.quantization.registry import METHODS

METHODS.register("smoothquant")(RoundToNearest())
