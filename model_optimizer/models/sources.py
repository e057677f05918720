"""Where tensors come from: a checkpoint on disk, or a seeded generator of one that is too large to keep.

Both give names, types and shapes as safetensors headers, and rows of one tensor at a time, so that what reads them holds a
piece of the largest tensor and never a model.

Shape letters: R rows of a tensor along its first dimension.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from model_optimizer.errors import ConfigError
from model_optimizer.models.headers import TensorHeader, read_headers

if TYPE_CHECKING:
    import torch

VIRTUAL_DTYPES = ("F32", "BF16", "F16")
POOL_ELEMENTS = (1 << 20) + 7
"""Values that a virtual source draws once; an odd count, so that rows of even width never repeat in step."""


class TensorSource(Protocol):
    """Tensors by name, in the order in which they are best read."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]: ...
    def rows(self, name: str, start: int, stop: int) -> "torch.Tensor":
        """Return rows [start, stop) of a tensor in its stored type; a scalar is its own only row."""


class CheckpointSource:
    """A directory of safetensors shards."""

    def __init__(self, directory: Path):
        """Read the headers.

        Raises:
            ConfigError: a shard is damaged or missing, or there is none.
        """
        found = read_headers(directory)
        if not found:
            raise ConfigError(f"{directory} holds no safetensors weights; give a Hugging Face model directory")
        self.headers: Mapping[str, TensorHeader] = found

    def rows(self, name: str, start: int, stop: int) -> "torch.Tensor":
        from safetensors import safe_open

        header = self.headers[name]
        with safe_open(header.file, framework="pt") as shard:
            if not header.shape:
                scalar: torch.Tensor = shard.get_tensor(name)
                return scalar
            rows: torch.Tensor = shard.get_slice(name)[start:stop]
        return rows


@dataclass(frozen=True)
class VirtualSource:
    """Random weights of stated shapes; every value follows from seed, name and position alone.

    Values are a pool of normal draws of standard deviation `spread`, read from a place that depends on the tensor's name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    seed: int = 0
    dtype: str = "BF16"
    spread: float = 0.02
    headers: Mapping[str, TensorHeader] = field(init=False)

    def __post_init__(self) -> None:
        if self.dtype not in VIRTUAL_DTYPES:
            raise ConfigError(f"a virtual source has no type {self.dtype!r}; known: {', '.join(VIRTUAL_DTYPES)}")
        size, position, headers = 4 if self.dtype == "F32" else 2, 0, {}
        for name, shape in self.shapes.items():
            num_bytes = math.prod(shape) * size
            headers[name] = TensorHeader(name, self.dtype, shape, Path("virtual"), position, num_bytes)
            position += num_bytes
        object.__setattr__(self, "headers", headers)

    def rows(self, name: str, start: int, stop: int) -> "torch.Tensor":
        import torch

        shape = self.shapes[name]
        width = math.prod(shape[1:])
        stop = min(stop, shape[0]) if shape else 1
        offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little") + start * width
        places = torch.arange(offset, offset + (stop - start) * width).remainder_(POOL_ELEMENTS)
        values = self._pool()[places]
        return values.reshape((stop - start, *shape[1:]) if shape else ())

    def _pool(self) -> "torch.Tensor":
        import torch

        types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        generator = torch.Generator().manual_seed(self.seed)
        return (torch.randn(POOL_ELEMENTS, generator=generator) * self.spread).to(types[self.dtype])


def llama_shapes(
    num_layers: int, hidden_size: int, intermediate_size: int, num_kv_features: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of an untied Llama checkpoint by name, in storage order; KV features are heads x head dimension."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden_size)}
    for block in range(num_layers):
        prefix = f"model.layers.{block}."
        attention = {"q": hidden_size, "k": num_kv_features, "v": num_kv_features}
        shapes |= {f"{prefix}self_attn.{leaf}_proj.weight": (size, hidden_size) for leaf, size in attention.items()}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden_size, hidden_size)
        shapes |= {f"{prefix}mlp.{leaf}_proj.weight": (intermediate_size, hidden_size) for leaf in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden_size, intermediate_size)
        shapes |= {f"{prefix}{norm}_layernorm.weight": (hidden_size,) for norm in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (hidden_size,), "lm_head.weight": (vocab_size, hidden_size)}
