"""The model that a budget is made for: dimensions, caches, and what its weights take on disk and in memory."""

import json
from dataclasses import dataclass
from pathlib import Path

from model_optimizer.errors import ConfigError
from model_optimizer.memory.budget import HEAD_COPYING_RUNTIMES, UNPACKING_RUNTIMES
from model_optimizer.memory.geometry import KvGeometry, read_geometry
from model_optimizer.memory.kv_layout import VALUE_BYTES
from model_optimizer.models.headers import read_headers
from model_optimizer.models.parts import is_linear, part_of
from model_optimizer.models.shape import ModelShape

GROUP_SIZE = 128
SCALE_BITS = 16
"""A weight of N bits costs N + 16 / 128: a 16-bit scale for each group of 128. Source: the usual group of INT4 checkpoints."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One decoder."""

    name: str
    shape: ModelShape
    geometry: KvGeometry
    num_parameters: int
    num_linear_parameters: int
    """Those that quantization covers; embedding, head and norms are not."""
    stored_bytes: int | None
    """Bytes of the weight files; None where there are only dimensions."""
    quantized: bool
    tied_head: bool
    plain_bytes: int = 0
    """Of the weight files: tensors that are neither codes nor scales, such as embedding, head and norms."""
    num_plain_parameters: int = 0

    def packed_bytes(self, bits: float | None, dtype: str) -> int:
        """Return the weights as stored, or as they would be with linears of so many bits and the rest in `dtype`."""
        if bits is None:
            return self.num_parameters * VALUE_BYTES[dtype] if self.stored_bytes is None else self.stored_bytes
        linear_bits = bits + SCALE_BITS / GROUP_SIZE
        rest = self.num_parameters - self.num_linear_parameters
        return int(self.num_linear_parameters * linear_bits / 8) + rest * VALUE_BYTES[dtype]

    def resident_bytes(self, runtime: str, bits: float | None, dtype: str, *, packed: bool) -> int:
        """Return what a runtime holds: in `dtype` all that it unpacks at load and all that is no code, else as stored."""
        if runtime in UNPACKING_RUNTIMES and not packed:
            return self.num_parameters * VALUE_BYTES[dtype]
        if runtime in UNPACKING_RUNTIMES and bits is None and self.stored_bytes is not None:
            return self.stored_bytes - self.plain_bytes + self.num_plain_parameters * VALUE_BYTES[dtype]
        copied = VALUE_BYTES["float32"] * self.shape.vocab_size * self.shape.hidden_size
        return self.packed_bytes(bits, dtype) + (copied if self.tied_head and runtime in HEAD_COPYING_RUNTIMES else 0)


def read_subject(directory: Path) -> Subject:
    """Return the model of a directory; one that holds only config.json is counted as its class would build it.

    Raises:
        ConfigError: no config.json, or it lacks a field, or a shard is damaged.
        UnsupportedError: no decoder whose cache is known.
    """
    from model_optimizer.formats.storage import CODE_TYPES, SUFFIXES  # imports torch

    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory} holds no config.json; give a model's directory")
    try:
        stated = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    quantized = stated.pop("quantization_config", None) is not None
    shape, geometry = read_geometry(stated)
    tensors = tuple(read_headers(directory).values())
    names = {tensor.name for tensor in tensors}
    tied = bool(stated.get("tie_word_embeddings", tensors and not any(part_of(name) == "head" for name in names)))
    unique = [tensor for tensor in tensors if not (tied and part_of(tensor.name) == "head")]
    if tensors and not quantized:
        total = sum(tensor.num_parameters for tensor in unique)
        linear = sum(tensor.num_parameters for tensor in unique if is_linear(tensor))
    else:
        total, linear = _counted(stated)
    stored = sum(tensor.num_bytes for tensor in unique) if tensors else None
    plain = [tensor for tensor in unique if tensor.dtype not in CODE_TYPES and not tensor.name.endswith(SUFFIXES)]
    return Subject(
        directory.name,
        shape,
        geometry,
        total,
        linear,
        stored,
        quantized,
        tied,
        plain_bytes=sum(tensor.num_bytes for tensor in plain),
        num_plain_parameters=sum(tensor.num_parameters for tensor in plain),
    )


def _counted(stated: dict[str, object]) -> tuple[int, int]:
    """Return parameters and linear parameters of the model that transformers builds from the config, without memory for them."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type = stated.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is unknown, so its weights cannot be counted; give weights too"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type].from_dict(dict(stated)))
    total = linear = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if parameter.dim() >= 2 and part_of(name) in ("attention", "ffn"):
            linear += parameter.numel()
    return total, linear
