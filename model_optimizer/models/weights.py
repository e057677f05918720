"""Weights one tensor at a time, so that no caller holds a whole model; and which of them are decoder linears."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from model_optimizer.errors import ConfigError
from model_optimizer.models.headers import INDEX, TensorHeader, read_headers, shard_paths, weight_map
from model_optimizer.models.parts import TRANSPOSED_TYPES, is_linear, read_config

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A decoder linear: q, k, v, o, gate, up, down and their like; never the embedding, head, or a router."""

    name: str
    """Module name, e.g. `model.layers.0.self_attn.q_proj`; its weight is `<name>.weight`."""
    out_features: int
    in_features: int

    @property
    def num_parameters(self) -> int:
        return self.out_features * self.in_features


def iter_tensors(directory: Path) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield every (name, tensor) of a model directory, shard by shard, on the CPU in its stored type."""
    from safetensors import safe_open

    for path in shard_paths(directory):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                yield name, shard.get_tensor(name)


def read_tensor(directory: Path, name: str) -> "torch.Tensor":
    """Return one tensor, on the CPU in its stored type.

    Raises:
        ConfigError: no shard holds it.
    """
    from safetensors import safe_open

    with safe_open(_shard_of(directory, name), framework="pt") as shard:
        tensor: torch.Tensor = shard.get_tensor(name)
    return tensor


def read_rows(directory: Path, name: str, num_rows: int) -> "torch.Tensor":
    """Return the first `num_rows` rows (or all, where there are fewer) of a matrix; the rest is not read."""
    from safetensors import safe_open

    with safe_open(_shard_of(directory, name), framework="pt") as shard:
        rows: torch.Tensor = shard.get_slice(name)[:num_rows]
    return rows


def linear_layers(directory: Path) -> tuple[LinearLayer, ...]:
    """Return the decoder linears in the order of the shards; only headers are read."""
    transposed = read_config(directory).get("model_type") in TRANSPOSED_TYPES
    return tuple(_linear(tensor, transposed) for tensor in read_headers(directory) if is_linear(tensor))


def _linear(tensor: TensorHeader, transposed: bool) -> LinearLayer:
    out_features, in_features = reversed(tensor.shape) if transposed else tensor.shape
    return LinearLayer(tensor.name.removesuffix(".weight"), out_features, in_features)


def _shard_of(directory: Path, name: str) -> Path:
    """Return the file that holds a tensor."""
    if (directory / INDEX).is_file() and (shard := weight_map(directory).get(name)) is not None:
        return directory / shard
    for tensor in read_headers(directory):
        if tensor.name == name:
            return tensor.file
    raise ConfigError(f"{directory} holds no tensor {name!r}")
