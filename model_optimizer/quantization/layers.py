"""Which linear layers of a model can be quantized, and which of them must share a format."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.model_config import CONFIG, SECTION, read_config
from model_optimizer.formats.registry import FORMATS
from model_optimizer.formats.storage import CODE_TYPES
from model_optimizer.models.headers import read_headers
from model_optimizer.models.linear_form import COVERED, RoutedExperts, linear_form
from model_optimizer.models.weights import read_tensor

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Projections that serving engines merge into one matrix. Source: vLLM's packed_modules_mapping for Llama and kin."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A matrix of out_features x in_features, by module name."""

    name: str
    out_features: int
    in_features: int
    transposed: bool = False
    """The plain checkpoint stores it as [I, O]."""

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The linear layers that may be quantized, in model order, and everything else that has weights."""

    linears: tuple[LinearLayer, ...]
    kept: dict[str, str]
    """Module name -> why it stays as it is (head, embedding, router, norm)."""
    routers: tuple[str, ...] = ()
    """Those of them that send tokens to experts."""


def read_layers(directory: Path) -> ModelLayers:
    """Return the layers of a covered model from its config alone, under the names of the checkpoint; no weight is read.

    Raises:
        UnsupportedError: the architecture is not covered, or the checkpoint is quantized already; it is named.
    """
    _refuse_quantized(directory)
    if not is_covered(directory):
        raise UnsupportedError(
            f"model type {read_config(directory).model_type!r} is not covered; covered are {', '.join(COVERED)}; "
            "`model-optimizer quantize` hands others to llm-compressor, where its environment is named"
        )
    model = _skeleton(directory)
    return _layers_of(directory, model, linear_form(model))


def read_plain_layers(directory: Path) -> ModelLayers:
    """Return the layers of any causal language model whose matrices are torch.nn.Linear, covered or not.

    Raises:
        UnsupportedError: it has no causal head, keeps matrices in another form, or is quantized already; what it is is named.
    """
    _refuse_quantized(directory)
    config = read_config(directory)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedError(f"model type {config.model_type!r} is no causal language model; only those are quantized")
    model = _skeleton(directory)
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise UnsupportedError(f"{name} of model type {config.model_type!r} is a Conv1D, not a torch.nn.Linear")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and "conv" not in name:
            raise UnsupportedError(f"{name} of model type {config.model_type!r} holds fused experts {tuple(parameter.shape)}")
    return _layers_of(directory, model, frozenset())


def find_layers(directory: Path) -> ModelLayers:
    """Return the layers of a model by `read_layers` where it is covered, else by `read_plain_layers`."""
    return read_layers(directory) if is_covered(directory) else read_plain_layers(directory)


def is_covered(directory: Path) -> bool:
    """Return whether tests saw models of this type quantized end to end by this product's own walk."""
    return read_config(directory).model_type in COVERED


def _refuse_quantized(directory: Path) -> None:
    read_config(directory)
    section = json.loads((directory / CONFIG).read_text(encoding="utf-8")).get(SECTION)
    if section is not None:
        raise UnsupportedError(
            f"{directory} is quantized already ({section.get('quant_method', 'by an unnamed method')}); "
            "give the full-precision model that it was made from"
        )


def _skeleton(directory: Path) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(read_config(directory))
    return model


def _layers_of(directory: Path, model: PreTrainedModel, transposed: frozenset[str]) -> ModelLayers:
    routers = {f"{name}.gate": len(it.experts) for name, it in model.named_modules() if isinstance(it, RoutedExperts)}
    head = model.get_output_embeddings()
    linears, kept = [], {}
    for name, module in model.named_modules():
        if module is head:
            kept[name] = "output head"
        elif name in routers:
            kept[name] = f"router over {routers[name]} experts"
        elif isinstance(module, torch.nn.Linear):
            linears.append(LinearLayer(name, module.out_features, module.in_features, name in transposed))
        elif next(module.parameters(recurse=False), None) is not None:
            kept[name] = type(module).__name__
    _require_weights(directory, linears)
    return ModelLayers(tuple(linears), kept, tuple(routers))


def _require_weights(directory: Path, linears: list[LinearLayer]) -> None:
    headers = read_headers(directory)
    if absent := [layer.name for layer in linears if f"{layer.name}.weight" not in headers]:
        raise UnsupportedError(
            f"{directory} does not store {absent[0]}.weight under its module's name ({len(absent)} such layers); "
            "already quantized or renamed checkpoints are not covered: give the full-precision model"
        )
    if codes := [layer.name for layer in linears if headers[f"{layer.name}.weight"].dtype in CODE_TYPES]:
        raise UnsupportedError(
            f"{directory} holds {codes[0]}.weight in 8 bits ({len(codes)} such layers), so it is quantized already, though its "
            f"{CONFIG} does not say so; give the full-precision model that it was made from"
        )
    if not linears:
        raise UnsupportedError(f"{directory} has no linear layer to quantize")


def weight_reader(directory: Path, layers: tuple[LinearLayer, ...]) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a layer's weight [O, I] in its stored type, whichever way round it is stored."""
    headers, transposed = read_headers(directory), {layer.name for layer in layers if layer.transposed}

    def read(name: str) -> torch.Tensor:
        stored = read_tensor(headers[f"{name}.weight"])
        return stored.T.contiguous() if name in transposed else stored

    return read


def is_expert(layer: str) -> bool:
    """Return whether a layer is part of one of several experts."""
    return _EXPERT.search(layer) is not None


def input_groups(layers: tuple[LinearLayer, ...]) -> tuple[tuple[LinearLayer, ...], ...]:
    """Return the layers in groups that read the same input: q/k/v and gate/up of one block or expert, others alone."""
    groups: dict[str, list[LinearLayer]] = {}
    for layer in layers:
        groups.setdefault(_family(layer.name), []).append(layer)
    return tuple(tuple(group) for group in groups.values())


def tie_groups(layers: tuple[LinearLayer, ...]) -> tuple[tuple[LinearLayer, ...], ...]:
    """Return the layers in groups that must share a format: those that read one input, and all experts of the model.

    Engines compute the experts of a layer in one kernel, and transformers 5.17 takes one scheme for all experts of a model.
    """
    groups: dict[str, list[LinearLayer]] = {}
    for layer in layers:
        groups.setdefault("experts" if is_expert(layer.name) else _family(layer.name), []).append(layer)
    return tuple(tuple(group) for group in groups.values())


def _family(layer: str) -> str:
    parent, _, leaf = layer.rpartition(".")
    return f"{parent}.{next((members[0] for members in _FUSED if leaf in members), leaf)}"


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
    """Return the formats of every sensitivity pass that every layer's shape can take, sorted."""
    return tuple(
        name
        for name in FORMATS.names()
        if FORMATS.get(name).scanned and not any(FORMATS.get(name).check(it.out_features, it.in_features) for it in layers)
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
