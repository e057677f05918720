"""Load a checkpoint, plain or quantized, as a float32 transformers model; never with fresh random weights.

Weights are the exact values that codes stand for, and layers whose format rounds inputs do so: the model computes what the
checkpoint says, in float32.
"""

from pathlib import Path
from typing import cast

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.formats.activations import round_inputs
from model_optimizer.formats.compressed_tensors import read_checkpoint_headers, read_plan, read_quantized_layer
from model_optimizer.formats.model_config import read_config as read_config
from model_optimizer.formats.registry import FORMATS
from model_optimizer.formats.storage import INPUT_SCALE, stored_parts
from model_optimizer.models.linear_form import TRANSPOSED
from model_optimizer.models.weights import iterate_tensors, read_tensor


def read_state(directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint under its plain name, packed layers unpacked; floats become float32.

    Raises:
        IntegrityError: shards, index and description do not belong together.
    """
    headers = read_checkpoint_headers(directory)
    plan = read_plan(directory)
    state = {}
    transposed = bool(plan) and read_config(directory).model_type in TRANSPOSED
    for layer, name in plan.items():
        weight_OI = FORMATS.get(name).dequantize(read_quantized_layer(directory, headers, layer, name))
        state[f"{layer}.weight"] = weight_OI.T.contiguous() if transposed else weight_OI
    packed = {layer + part.suffix for layer, name in plan.items() for part in stored_parts(FORMATS.get(name), 1, 1)}
    for name, tensor in iterate_tensors([header for name, header in headers.items() if name not in packed]):
        state[name] = tensor.float() if tensor.is_floating_point() else tensor
    return state


def load_dequantized(directory: Path) -> PreTrainedModel:
    """Return the model of a plain or packed checkpoint in float32 on the CPU, in eval mode, ties kept.

    Raises:
        ConfigError: no config.json, or an architecture without a causal language model head.
        IntegrityError: a tensor is missing, unexpected or of another shape; the message lists them.
    """
    config = read_config(directory)
    model, loading = _build(config, read_state(directory))
    faults = [f"{kind}: {', '.join(sorted(map(str, names))[:8])}" for kind, names in loading.items() if names]
    if faults:
        raise IntegrityError(
            f"the weights in {directory} do not fit its config.json ({'; '.join(faults)}); restore or make it again"
        )
    _round_inputs(directory, model)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _round_inputs(directory: Path, model: PreTrainedModel) -> None:
    plan = {layer: name for layer, name in read_plan(directory).items() if FORMATS.get(name).activation is not None}
    if plan:
        headers = read_checkpoint_headers(directory)
        frozen = {layer: headers[layer + INPUT_SCALE] for layer in plan if layer + INPUT_SCALE in headers}
        round_inputs(model, plan, {layer: read_tensor(header) for layer, header in frozen.items()})


def _build(config: transformers.PretrainedConfig, state: dict[str, torch.Tensor]) -> tuple[PreTrainedModel, dict[str, set[str]]]:
    """Return the model and what transformers found missing, unexpected or mismatched."""
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ConfigError(f"model type {config.model_type!r} has no causal language model in transformers")
    architecture = cast(type[PreTrainedModel], mapping[type(config)])
    loaded = architecture.from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True, dtype=torch.float32
    )
    model, loading = cast(tuple[PreTrainedModel, dict[str, set[str]]], loaded)
    return model.eval(), loading
