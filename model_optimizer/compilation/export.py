"""Write a float32 ONNX model with KV cache from a Hugging Face directory, one tensor in memory at a time."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from numpy.typing import NDArray

from model_optimizer.compilation.decoder_graph import DecoderGraph, DecoderShape
from model_optimizer.compilation.external_data import MODEL, DataWriter
from model_optimizer.compilation.graph_form import GraphForm
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.model_config import read_config
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.runtimes.ort_models import MAX_POSITION

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are RMSNorm, rotary grouped-query attention and a SiLU-gated feed-forward part."""
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the sequence."""


def export_model(source: Path, target: Path, form: GraphForm | None = None) -> None:
    """Write `target/model.onnx` and its data file.

    Raises:
        UnsupportedError: the architecture has a part that the graph does not draw.
    """
    config = read_config(source)
    headers = read_headers(source)
    if reason := unsupported_part(config):
        raise UnsupportedError(f"{source} cannot be exported to ONNX: {reason}; use the `torch` runtime")
    shape = _shape(config, frozenset(headers))
    form = form or GraphForm()
    graph = DecoderGraph(shape, *_rotary(config, shape.head_dim), form)
    if unread := sorted(headers.keys() - graph.weights.keys() - {"lm_head.weight"}):
        some = f"{len(unread)} tensors have no place in the graph ({', '.join(unread[:3])})"
        raise UnsupportedError(f"{source} cannot be exported to ONNX: {some}; use the `torch` runtime")
    target.mkdir(parents=True, exist_ok=True)
    weights = []
    with DataWriter(target) as data:
        for name, transposed in graph.weights.items():
            tensor = read_tensor(headers[name]).float()
            array = (tensor.t() if transposed else tensor).contiguous().numpy()
            weights.append(data.add(name, array.astype(form.dtype, copy=False)))
    model = graph.model(weights)
    onnx.helper.set_model_props(model, {MAX_POSITION: str(config.max_position_embeddings)})
    onnx.save(model, target / MODEL)


def _rotary(config: "PretrainedConfig", head_dim: int) -> tuple[NDArray[np.float32], float]:
    """Return inverse frequencies [D/2] and the factor on cos and sin, as transformers computes them."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary_type = config.rope_parameters["rope_type"]
    if rotary_type == "default":
        exponent_D = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return (1.0 / config.rope_parameters["rope_theta"] ** exponent_D).numpy(), 1.0
    frequency_D, scale = ROPE_INIT_FUNCTIONS[rotary_type](config, torch.device("cpu"))
    return frequency_D.numpy().astype(np.float32), float(scale)


def unsupported_part(config: "PretrainedConfig") -> str | None:
    """Return what in a configuration the graph cannot draw, or None."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    rotary_type = config.rope_parameters["rope_type"]
    if rotary_type not in STATIC_ROTARY:
        return f"rotary type {rotary_type!r} is not one of {', '.join(STATIC_ROTARY)}"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "only a part of each head is rotated"
    window = config.to_dict().get("sliding_window")
    if window is not None and config.to_dict().get("use_sliding_window", True):
        return f"attention slides over {window} tokens"
    return None


def _shape(config: "PretrainedConfig", tensors: frozenset[str]) -> DecoderShape:
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return DecoderShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_epsilon=config.rms_norm_eps,
        tied_head=config.tie_word_embeddings,
        tensors=tensors,
    )
