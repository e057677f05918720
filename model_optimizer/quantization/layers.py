"""Which linear layers of a model can be quantized, and which of them must share a format."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.model_config import read_config
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that serving engines merge into one matrix. Source: vLLM's packed_modules_mapping for Llama and kin."""


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A matrix of out_features x in_features, by module name."""

    name: str
    out_features: int
    in_features: int

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The linear layers that may be quantized, in model order, and everything else that has weights."""

    linears: tuple[LinearLayer, ...]
    kept: dict[str, str]
    """Module name -> why it stays as it is (head, embedding, router, norm)."""


def read_layers(directory: Path) -> ModelLayers:
    """Return the layers of a model from its config alone; no weight is read.

    Raises:
        UnsupportedError: the architecture keeps matrices in a form that is not covered; it is named.
    """
    config = read_config(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    _refuse_uncovered(model)
    settings = config.to_dict()
    num_experts = settings.get("num_local_experts") or settings.get("num_experts")
    head = model.get_output_embeddings()
    linears, kept = [], {}
    for name, module in model.named_modules():
        if module is head:
            kept[name] = "output head"
        elif isinstance(module, torch.nn.Linear) and module.out_features != num_experts:
            linears.append(LinearLayer(name, module.out_features, module.in_features))
        elif isinstance(module, torch.nn.Linear):
            kept[name] = f"router over {num_experts} experts"
        elif next(module.parameters(recurse=False), None) is not None:
            kept[name] = type(module).__name__
    _require_weights(directory, linears)
    return ModelLayers(tuple(linears), kept)


def _refuse_uncovered(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise UnsupportedError(f"{name} is a Conv1D, which is not covered; covered are models built of torch.nn.Linear")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            raise UnsupportedError(f"{name} holds fused experts of shape {tuple(parameter.shape)}, which are not covered yet")


def _require_weights(directory: Path, linears: list[LinearLayer]) -> None:
    headers = read_headers(directory)
    if absent := [layer.name for layer in linears if f"{layer.name}.weight" not in headers]:
        raise UnsupportedError(
            f"{directory} does not store {absent[0]}.weight under its module's name ({len(absent)} such layers); "
            "already quantized or renamed checkpoints are not covered: give the full-precision model"
        )
    if not linears:
        raise UnsupportedError(f"{directory} has no linear layer to quantize")


def tie_groups(layers: tuple[LinearLayer, ...]) -> tuple[tuple[LinearLayer, ...], ...]:
    """Return the layers in groups that must share a format: q/k/v and gate/up of one block, others alone."""
    groups: dict[str, list[LinearLayer]] = {}
    for layer in layers:
        parent, _, leaf = layer.name.rpartition(".")
        family = next((members[0] for members in _FUSED if leaf in members), leaf)
        groups.setdefault(f"{parent}.{family}", []).append(layer)
    return tuple(tuple(group) for group in groups.values())


def require_fit(layers: tuple[LinearLayer, ...], format_name: str) -> None:
    """Refuse a format that some layer's shape cannot take, before anything is computed.

    Raises:
        UnsupportedError: names the layers, their width, the group, the remainder and the widths that fit all layers.
    """
    weight_format = FORMATS.get(format_name)
    reasons = {layer.name: weight_format.check(layer.out_features, layer.in_features) for layer in layers}
    faults = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if faults:
        more = f" and {len(faults) - 3} more layers" if len(faults) > 3 else ""
        known = ", ".join(fitting_formats(layers)) or "none"
        raise UnsupportedError(
            f"{format_name} does not fit {'; '.join(faults[:3])}{more}; "
            f"groups that divide every layer: {', '.join(map(str, valid_groups(layers)))}; formats that fit: {known}"
        )


def valid_groups(layers: tuple[LinearLayer, ...]) -> tuple[int, ...]:
    """Return every group size that divides the input width of all layers, rising."""
    widths = {layer.in_features for layer in layers}
    return tuple(size for size in range(1, min(widths) + 1) if all(width % size == 0 for width in widths))


def fitting_formats(layers: tuple[LinearLayer, ...]) -> tuple[str, ...]:
    """Return the registered formats below 16 bits that every layer's shape can take, sorted."""
    return tuple(
        name
        for name in FORMATS.names()
        if FORMATS.get(name).bits < 16 and not any(FORMATS.get(name).check(it.out_features, it.in_features) for it in layers)
    )


def matching_layers(pattern: str, layers: ModelLayers) -> tuple[str, ...]:
    """Return the quantizable layers whose name contains `pattern` on whole name parts (`q_proj`, `layers.1`, `mlp.up_proj`).

    Raises:
        ConfigError: neither a quantizable layer nor one that is kept anyway matches.
    """
    expression = re.compile(rf"(^|\.){re.escape(pattern)}($|\.)")
    found = tuple(layer.name for layer in layers.linears if expression.search(layer.name))
    if not found and not any(expression.search(name) for name in layers.kept):
        examples = ", ".join(layer.name for layer in layers.linears[:2])
        raise ConfigError(f"the layer pattern {pattern!r} matches no layer; names look like {examples}")
    return found
