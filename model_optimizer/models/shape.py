"""The dimensions of a decoder from its config alone: optimum's normalized names first, then every alias in use."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from model_optimizer.artifacts.target import KvLayer
from model_optimizer.errors import ConfigError, UnsupportedError

Config = Mapping[str, object]
ALIASES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "max_position": ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "num_experts_per_token": ("num_experts_per_tok", "moe_top_k", "num_selected_experts"),
}
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
_FULL = "full_attention"
_SLIDING = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions that sizes and costs follow from."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    expert_share: float
    """Experts that a token visits / experts; 1 for a dense model."""
    layer_types: tuple[str, ...]
    window: int | None


def read_shape(stated: Config) -> ModelShape:
    """Return the dimensions that a config states, class defaults included where the model type is known.

    Raises:
        ConfigError: a field is missing; the message names every accepted spelling.
        UnsupportedError: the cache of this architecture is not one that is known here.
    """
    config = _with_class_defaults(stated)
    _refuse_unknown_caches(config)
    normalized = _normalized(stated)
    required = {
        name: normalized.get(name) or _number(config, name) for name in ("num_layers", "hidden_size", "num_heads", "vocab_size")
    }
    for name, value in required.items():
        if value is None:
            raise ConfigError(f"config.json: missing field for {name}; accepted: {', '.join(ALIASES[name])}")
    layers, hidden, heads, vocab = (int(value or 0) for value in required.values())
    head_dim = config.get("head_dim")
    experts, visited = _number(config, "num_experts"), _number(config, "num_experts_per_token")
    return ModelShape(
        model_type=str(config.get("model_type", "unknown")),
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=_number(config, "intermediate_size") or 4 * hidden,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(config, heads),
        head_dim=head_dim if isinstance(head_dim, int) and head_dim > 0 else hidden // heads,
        vocab_size=vocab,
        max_position=_number(config, "max_position") or 0,
        expert_share=visited / experts if experts and visited else 1.0,
        layer_types=_layer_types(config, layers),
        window=_window(config),
    )


def kv_layers(shape: ModelShape, value_bytes: int) -> tuple[KvLayer, ...]:
    """Return the KV cache per token and layer type: 2 x KV heads x head dimension x `value_bytes` per layer.

    Source: the shape of the cache tensors, [batch, KV heads, tokens, head dimension], keys and values (X15).
    """
    per_layer = 2 * shape.num_kv_heads * shape.head_dim * value_bytes
    return tuple(
        KvLayer(
            layer_type=layer_type,
            num_layers=count,
            bytes_per_token=count * per_layer,
            max_tokens=None if layer_type == _FULL else shape.window,
        )
        for layer_type, count in Counter(shape.layer_types).items()
    )


def _with_class_defaults(stated: Config) -> dict[str, object]:
    """Return the config as transformers completes it; as it stands where it knows no such model type."""
    from transformers import CONFIG_MAPPING

    model_type = stated.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return dict(stated)
    complete: dict[str, object] = CONFIG_MAPPING[model_type].from_dict(dict(stated)).to_dict()
    return complete


def _normalized(stated: Config) -> dict[str, int | None]:
    """Return what optimum's normalized config knows, by our names."""
    from optimum.utils import NormalizedConfigManager
    from transformers import CONFIG_MAPPING

    model_type = stated.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return {}
    try:
        kind = NormalizedConfigManager.get_normalized_config_class(model_type)
    except KeyError:
        return {}
    config = kind(CONFIG_MAPPING[model_type].from_dict(dict(stated)))
    return {
        "num_layers": _readable(lambda: config.num_layers),
        "hidden_size": _readable(lambda: config.hidden_size),
        "num_heads": _readable(lambda: config.num_attention_heads),
        "vocab_size": _readable(lambda: config.vocab_size),
    }


def _readable(read: Callable[[], object]) -> int | None:
    """Return what `read` gives where optimum finds the attribute at all."""
    try:
        value = read()
    except AttributeError:
        return None
    return value if isinstance(value, int) else None


def _number(config: Config, name: str) -> int | None:
    """Return the first alias of `name` that holds a positive whole number."""
    for alias in ALIASES[name]:
        value = config.get(alias)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _num_kv_heads(config: Config, num_heads: int) -> int:
    """Return the heads of the cache; multi-query wins over a `num_kv_heads` that merely repeats the query heads (falcon)."""
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        return 1
    return _number(config, "num_kv_heads") or num_heads


def _window(config: Config) -> int | None:
    """Return the sliding window in tokens, where one is in use."""
    window = config.get("sliding_window")
    return window if isinstance(window, int) and window > 0 and config.get("use_sliding_window") is not False else None


def _layer_types(config: Config, num_layers: int) -> tuple[str, ...]:
    """Return one type per layer."""
    types = config.get("layer_types")
    if isinstance(types, (list, tuple)) and types:
        return tuple(str(kind) for kind in types)
    return ((_SLIDING[0] if _window(config) else _FULL),) * num_layers


def _refuse_unknown_caches(config: Config) -> None:
    """Refuse caches whose size does not follow from KV heads and head dimension."""
    if "text_config" in config:
        raise UnsupportedError("config.json describes a model with a nested text_config; only text decoders are supported")
    if config.get("kv_lora_rank"):
        raise UnsupportedError("config.json: latent attention (kv_lora_rank) keeps another cache, which is not supported yet")
    if config.get("num_kv_shared_layers"):
        raise UnsupportedError("config.json: layers that share their cache (num_kv_shared_layers) are not supported yet")
    types = config.get("layer_types")
    known = {_FULL, *_SLIDING}
    if isinstance(types, (list, tuple)) and (unknown := sorted({str(kind) for kind in types} - known)):
        raise UnsupportedError(
            f"config.json: layer types {', '.join(unknown)} are not supported; known: {', '.join(sorted(known))}"
        )
