"""Whole models in the form that layers are quantized in."""

from pathlib import Path

from transformers import PreTrainedModel

from model_optimizer.formats.loading import load_dequantized
from model_optimizer.models.linear_form import linear_form


def load_linear(directory: Path) -> PreTrainedModel:
    """Return a checkpoint as `load_dequantized` does, every quantizable matrix a linear layer under its stored name.

    Raises:
        ConfigError, IntegrityError: as `load_dequantized`.
    """
    model = load_dequantized(directory)
    linear_form(model)
    return model
