"""The weight formats by name; one family of formats is one file in `formats/weights/`."""

from model_optimizer.formats.base import WeightFormat
from model_optimizer.registry import Registry

FORMATS: Registry[WeightFormat] = Registry("weight format", "model_optimizer.formats.weights")
FULL_PRECISION = "float32"
"""The format of a layer that is left as the source holds it."""
