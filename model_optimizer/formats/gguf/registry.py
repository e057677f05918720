"""The GGUF block types by name; one type is one file in `blocks/`."""

from model_optimizer.formats.gguf.base import BlockFormat
from model_optimizer.registry import Registry

BLOCKS: Registry[BlockFormat] = Registry("GGUF block type", "model_optimizer.formats.gguf.blocks")
