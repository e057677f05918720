"""The foldable transforms by name; one transform is one file in this folder."""

from model_optimizer.quantization.transforms.base import Transform
from model_optimizer.registry import Registry

TRANSFORMS: Registry[Transform] = Registry("foldable transform", "model_optimizer.quantization.transforms")
