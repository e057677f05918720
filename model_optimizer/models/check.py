"""Look at a user's model directory before any work: everything that would fail or mislead later is said here in one line."""

import json
from pathlib import Path

from model_optimizer.errors import ConfigError
from model_optimizer.models.headers import INDEX, TensorHeader, read_header, read_index, shard_paths

_NAMES_SHOWN = 5


def check_model_directory(directory: Path) -> tuple[TensorHeader, ...]:
    """Return the tensors of a sound Hugging Face directory.

    Raises:
        ConfigError: no config, no weights, pickle weights only, code inside, a damaged or missing shard, an index that does
            not match its shards, or no tokenizer.
    """
    check_config(directory)
    paths = shard_paths(directory)
    if not paths:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        if pickles:
            raise ConfigError(
                f"{directory} holds pickle weights only ({pickles[0]}), which can run code when read; save it as safetensors"
            )
        raise ConfigError(f"{directory} holds no weights; expected *.safetensors")
    tensors = tuple(tensor for path in paths for tensor in read_header(path))
    _check_names(directory, tensors)
    if (directory / INDEX).is_file():
        _check_index(directory, tensors)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"{directory} holds no tokenizer; expected tokenizer.json beside config.json")
    return tensors


def check_config(directory: Path) -> None:
    """Refuse a directory without a readable config.json, or with one that needs code from the model's author."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory} holds no config.json; a model reference names a Hugging Face model directory")
    try:
        config = json.loads(path.read_bytes())
    except (UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}, not an object")
    if "auto_map" in config:
        raise ConfigError(
            f"{path} asks for the model author's own code (auto_map), which is never executed; use a built-in class"
        )


def _check_names(directory: Path, tensors: tuple[TensorHeader, ...]) -> None:
    """Refuse a tensor that two shards hold."""
    places: dict[str, str] = {}
    for tensor in tensors:
        if tensor.name in places:
            raise ConfigError(f"{directory}: tensor {tensor.name} lies in both {places[tensor.name]} and {tensor.file.name}")
        places[tensor.name] = tensor.file.name


def _check_index(directory: Path, tensors: tuple[TensorHeader, ...]) -> None:
    """Refuse an index whose names, places or total size differ from what the shards hold."""
    index = read_index(directory)
    found = {tensor.name: tensor.file.name for tensor in tensors}
    faults = {
        "missing from the shards": sorted(index.weight_map.keys() - found.keys()),
        "absent from the index": sorted(found.keys() - index.weight_map.keys()),
        "in another shard than stated": sorted(name for name, file in index.weight_map.items() if found.get(name, file) != file),
    }
    for fault, names in faults.items():
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            raise ConfigError(f"{directory / INDEX}: {', '.join(names[:_NAMES_SHOWN])}{more}: {fault}; fetch the model again")
    total = sum(tensor.num_bytes for tensor in tensors)
    if index.metadata.total_size not in (None, total):
        raise ConfigError(f"{directory / INDEX} states total_size {index.metadata.total_size}, the shards hold {total} bytes")
