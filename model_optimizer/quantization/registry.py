"""The quantization methods by name; one method is one file in `quantization/methods/`."""

from model_optimizer.quantization.methods.base import Method
from model_optimizer.registry import Registry

METHODS: Registry[Method] = Registry("quantization method", "model_optimizer.quantization.methods")
