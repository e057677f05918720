"""What a GGUF file says about a model's shape, and which of its tensors goes where.

    frequency[i] of llama3 scaling: as it is for short waves, divided by `factor` for long ones, between them blended

Tensors keep their values; rows of q and k are reordered where llama.cpp rotates neighbouring pairs instead of halves.

Shape letters: O output features.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.gguf.base import Floats
from model_optimizer.formats.model_config import CONFIG, SECTION, read_config
from model_optimizer.models.parts import read_config as read_stated

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""transformers' model type -> llama.cpp's architecture."""
PAIRED = ("llama",)
"""Architectures whose q and k llama.cpp rotates in pairs. Source: llama.cpp, llama_model_rope_type, ROPE_TYPE_NORM."""
ROPE_FACTORS = "rope_freqs.weight"
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors of old checkpoints that follow from the configuration."""
_QUERY_OR_KEY = re.compile(r"\.(q|k)_proj\.(weight|bias)$")


class Rope(BaseModel):
    """Rotary embedding as transformers states it."""

    model_config = ConfigDict(extra="ignore")

    rope_theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0


class Decoder(BaseModel):
    """The fields of a decoder's configuration that a file states."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    rms_norm_eps: float
    max_position_embeddings: int
    vocab_size: int
    rope_parameters: Rope
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    tie_word_embeddings: bool

    @property
    def architecture(self) -> str:
        return ARCHITECTURES[self.model_type]

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def window(self) -> int | None:
        """Tokens that a sliding layer sees; None where every layer sees all."""
        sliding = self.layer_types is None or "sliding_attention" in self.layer_types
        return self.sliding_window if sliding else None

    @property
    def context_length(self) -> int:
        """Return the tokens up to which llama.cpp, which always attends to all, computes the same."""
        return min(self.max_position_embeddings, self.window or self.max_position_embeddings)


def read_decoder(directory: Path) -> Decoder:
    """Return what a model directory states about its shape.

    Raises:
        UnsupportedError: the architecture or its rotary scaling is not covered, or the weights are quantized already.
        ConfigError: the configuration lacks a field.
    """
    if SECTION in read_stated(directory):
        raise UnsupportedError(f"{directory} is quantized already; export the full-precision model it was made of")
    config = read_config(directory)
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedError(
            f"{directory}: architecture {config.model_type!r} is not covered by the GGUF export; "
            f"covered: {', '.join(sorted(ARCHITECTURES))}"
        )
    try:
        decoder = Decoder.model_validate(config.to_dict())
    except ValidationError as error:
        raise ConfigError(f"{directory / CONFIG} lacks or misstates {error.errors()[0]['loc']}; fetch it again") from error
    if decoder.rope_parameters.rope_type not in ("default", "linear", "yarn", "llama3"):
        raise UnsupportedError(
            f"{directory}: rotary scaling {decoder.rope_parameters.rope_type!r} is not covered by the GGUF export; "
            "covered: default, linear, yarn, llama3"
        )
    return decoder


def state(decoder: Decoder, writer: "GGUFWriter") -> None:
    """Add the fields that describe the model's shape."""
    from gguf import RopeScalingType

    writer.add_block_count(decoder.num_hidden_layers)
    writer.add_context_length(decoder.context_length)
    writer.add_embedding_length(decoder.hidden_size)
    writer.add_feed_forward_length(decoder.intermediate_size)
    writer.add_head_count(decoder.num_attention_heads)
    writer.add_head_count_kv(decoder.num_key_value_heads)
    writer.add_key_length(decoder.head_size)
    writer.add_value_length(decoder.head_size)
    writer.add_layer_norm_rms_eps(decoder.rms_norm_eps)
    writer.add_vocab_size(decoder.vocab_size)
    rope = decoder.rope_parameters
    writer.add_rope_dimension_count(decoder.head_size)
    writer.add_rope_freq_base(rope.rope_theta)
    if rope.rope_type in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType.LINEAR if rope.rope_type == "linear" else RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.factor)
        if rope.original_max_position_embeddings is not None:
            writer.add_rope_scaling_orig_ctx_len(rope.original_max_position_embeddings)


def rope_factors(decoder: Decoder) -> Floats | None:
    """Return by how much each rotary frequency is divided, [head size / 2], under llama3 scaling; None under any other.

    Source: transformers, modeling_rope_utils, _compute_llama3_parameters.
    """
    rope, size = decoder.rope_parameters, decoder.head_size
    if rope.rope_type != "llama3":
        return None
    original = rope.original_max_position_embeddings or decoder.max_position_embeddings
    factors = []
    for step in range(0, size, 2):
        wave_length = 2 * math.pi * rope.rope_theta ** (step / size)
        blend = (original / wave_length - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = min(1.0, max(0.0, blend))
        factors.append(1 / ((1 - blend) / rope.factor + blend))
    return np.array(factors, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint's tensor goes."""

    source: str
    name: str
    num_pairs_of: int | None = None
    """Heads whose rows are reordered from two halves to neighbouring pairs; None = rows as they are."""


def places(decoder: Decoder, tensors: tuple[str, ...]) -> tuple[Place, ...]:
    """Return every tensor to write in the order of the model; a tied head and derived tensors are left out.

    Raises:
        UnsupportedError: a tensor has no name in this architecture.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    known = get_tensor_name_map(numbers[decoder.architecture], decoder.num_hidden_layers)
    found = []
    for source in tensors:
        if _DERIVED.search(source) or (decoder.tie_word_embeddings and source == "lm_head.weight"):
            continue
        name = known.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UnsupportedError(f"tensor {source} has no place in a GGUF file of architecture {decoder.architecture!r}")
        found.append(Place(source, name, _heads(decoder, source)))
    return tuple(sorted(found, key=_order))


def _heads(decoder: Decoder, source: str) -> int | None:
    match = _QUERY_OR_KEY.search(source)
    if match is None or decoder.architecture not in PAIRED:
        return None
    return decoder.num_attention_heads if match[1] == "q" else decoder.num_key_value_heads


def _order(place: Place) -> tuple[int, int, str]:
    """Embedding first, then block by block, then what follows the blocks."""
    parts = place.name.split(".")
    if parts[0] == "blk":
        return 1, int(parts[1]), place.name
    return (0 if parts[0] == "token_embd" else 2), 0, place.name


def paired_rows(num_rows: int, num_heads: int) -> NDArray[np.int64]:
    """Return which source row [O] goes where: of each head, rows i and i + half become neighbours.

    Source: llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute.
    """
    return np.arange(num_rows).reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(-1)
