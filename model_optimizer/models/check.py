"""Look at a user's model directory before any work: everything that would fail or mislead later is said here in one line."""

import json
from pathlib import Path

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.models.dimensions import check_tensors, is_native, read_dimensions
from model_optimizer.models.headers import TensorHeader, read_headers
from model_optimizer.models.tokenizer_files import check_tokenizer


def check_model_directory(directory: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a sound Hugging Face directory by name.

    Raises:
        ConfigError: no config, no weights, pickle weights only, code that would have to run, a damaged or missing shard, an
            index that does not match its shards, shapes that the config does not ask for, or no fitting tokenizer.
        UnsupportedError: an architecture that is not covered, or weights that are quantized already.
    """
    config = check_config(directory)
    path = directory / "config.json"
    tensors = read_headers(directory)
    if not tensors:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        if pickles:
            raise ConfigError(
                f"{directory} holds pickle weights only ({pickles[0]}), which can run code when read; save it as safetensors"
            )
        raise ConfigError(f"{directory} holds no weights; expected *.safetensors")
    if "quantization_config" in config:
        raise UnsupportedError(
            f"{directory} is already quantized (quantization_config in config.json); name the unquantized model"
        )
    dimensions = read_dimensions(config, path)
    check_tensors(dimensions, tensors, path)
    check_tokenizer(directory, dimensions.vocab_size)
    return tensors


def check_config(directory: Path) -> dict[str, object]:
    """Return config.json; refuse a directory without a readable one, or with one that needs code from the model's author."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory} holds no config.json; a model reference names a Hugging Face model directory")
    try:
        config = json.loads(path.read_bytes())
    except (UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}, not an object")
    code = own_code(directory, config)
    if code and not is_native(str(config.get("model_type"))):
        raise ConfigError(
            f"{path}: model type {config.get('model_type')!r} needs the model author's own code ({code}), which is never "
            "executed; use a built-in architecture"
        )
    return config


def own_code(directory: Path, config: dict[str, object]) -> str | None:
    """Return what of the author's code lies there, or is asked for, or None."""
    if "auto_map" in config:
        return "auto_map in config.json"
    return next((file.name for file in sorted(directory.glob("*.py"))), None)
