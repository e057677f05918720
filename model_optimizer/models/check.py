"""Look at a user's model directory before any work: everything that would fail or mislead later is said here in one line."""

import json
from pathlib import Path

from model_optimizer.errors import ConfigError
from model_optimizer.models.headers import TensorHeader, read_headers


def check_model_directory(directory: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a sound Hugging Face directory by name.

    Raises:
        ConfigError: no config, no weights, pickle weights only, code inside, a damaged or missing shard, an index that does
            not match its shards, or no tokenizer.
    """
    check_config(directory)
    tensors = read_headers(directory)
    if not tensors:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        if pickles:
            raise ConfigError(
                f"{directory} holds pickle weights only ({pickles[0]}), which can run code when read; save it as safetensors"
            )
        raise ConfigError(f"{directory} holds no weights; expected *.safetensors")
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
