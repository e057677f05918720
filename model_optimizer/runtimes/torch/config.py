"""What the native runtime must know of a model, and how it may be run. First file to read of this package; then, in order:

linear      one matrix product, dense or packed
weights     a checkpoint becomes linears, shard after shard
batch       a step's tokens of many sequences laid out flat
attention   the seam where kernels over pages plug in
model       the forward pass over a flat batch
sampler     logits become tokens
sequence    one request while it lives
scheduler   which tokens run next, and who gives way when pages run out
scoring     teacher-forced scores over the same forward pass
engine      the Runtime that all of this makes
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.model_config import CONFIG, SECTION, read_config
from model_optimizer.models.shape import ModelShape, read_shape
from model_optimizer.runtimes.native_options import NativeOptions as NativeOptions

COVERED = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type`. SmolLM and SmolLM2 are llamas by their own config."""
_SCALED_ROPES = ("linear", "llama3", "yarn")
"""Rotary scalings that do not depend on how long the sequence has become."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts that the forward pass follows from."""

    shape: ModelShape
    norm_eps: float
    windows: tuple[int | None, ...]
    """Per layer, how many tokens back a token sees, itself counted; None = all."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normed per head."""
    tied_head: bool
    inv_freq: tuple[float, ...]
    """Rotary frequencies, half a head dimension of them."""
    rope_gain: float
    """Factor on cosines and sines (yarn)."""


def read_model_config(directory: Path) -> ModelConfig:
    """Return the facts of a covered model.

    Raises:
        ConfigError: config.json is absent or lacks a field.
        UnsupportedError: names what the native runtime does not cover.
    """
    config = read_config(directory)
    stated = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    stated.pop(SECTION, None)
    if config.model_type not in COVERED:
        raise UnsupportedError(
            f"the native runtime does not cover model type {config.model_type!r}; covered: {', '.join(COVERED)}"
        )
    if config.hidden_act != "silu":
        raise UnsupportedError(f"the native runtime does not cover the activation {config.hidden_act!r}; covered: silu")
    shape = read_shape(stated)
    inv_freq, gain = _rotary(config, shape.head_dim)
    own_bias = config.model_type in ("llama", "qwen3") and bool(config.attention_bias)
    return ModelConfig(
        shape=shape,
        norm_eps=float(config.rms_norm_eps),
        windows=_windows(shape),
        qkv_bias=own_bias or config.model_type == "qwen2",
        output_bias=own_bias,
        mlp_bias=config.model_type == "llama" and bool(config.mlp_bias),
        qk_norm=config.model_type == "qwen3",
        tied_head=bool(config.tie_word_embeddings),
        inv_freq=tuple(inv_freq.tolist()),
        rope_gain=gain,
    )


def _windows(shape: ModelShape) -> tuple[int | None, ...]:
    """Return the window of every layer; a Mistral with one has it everywhere, a Llama nowhere."""
    if shape.model_type == "llama":
        return (None,) * shape.num_layers
    if shape.model_type == "mistral":
        return (shape.window,) * shape.num_layers
    return tuple(shape.window if kind == "sliding_attention" else None for kind in shape.layer_types)


def _rotary(config: transformers.PretrainedConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return float32 frequencies [D / 2] and the factor on cosines and sines.

    Source: RoFormer (arXiv 2104.09864), section 3.2.2, theta_i = base^(-2i / D); scalings as transformers computes them.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError("the native runtime does not cover partial_rotary_factor; rotary positions must span the head")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    if kind not in _SCALED_ROPES:
        raise UnsupportedError(
            f"the native runtime does not cover rope type {kind!r}; covered: default, {', '.join(_SCALED_ROPES)}"
        )
    inv_freq, gain = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq.float(), float(gain)
