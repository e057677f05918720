"""Read a model's config.json: as transformers understands it, and the section that describes quantization."""

import json
from pathlib import Path

import transformers
from transformers import AutoConfig

from model_optimizer.errors import ConfigError

CONFIG = "config.json"
SECTION = "quantization_config"


def read_config(directory: Path) -> transformers.PretrainedConfig:
    """Return the model's configuration without its quantization section.

    Raises:
        ConfigError: no readable config.json there.
    """
    if not (directory / CONFIG).is_file():
        raise ConfigError(f"{directory} holds no {CONFIG}; give a Hugging Face model directory")
    data = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    data.pop(SECTION, None)
    try:
        return AutoConfig.for_model(**data)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{directory / CONFIG}: model type {data.get('model_type')!r} is not known to transformers") from error
