"""What a model is, from config and shard headers; no weight is loaded."""

from pathlib import Path

from model_optimizer.artifacts.target import ModelFacts
from model_optimizer.errors import ConfigError
from model_optimizer.models.check import check_config
from model_optimizer.models.headers import ITEM_BITS, TensorHeader, read_headers
from model_optimizer.models.parts import PARTS, is_expert, is_linear, part_of, read_config
from model_optimizer.models.shape import DTYPE_BYTES, ModelShape, kv_layers, read_shape

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "F8_E4M3": "float8_e4m3fn"}


def read_facts(directory: Path, kv_dtype: str | None = None) -> ModelFacts:
    """Return a model's facts; `kv_dtype` is the type of the KV cache, by default that of the weights.

    Raises:
        ConfigError: config.json or a shard header is unreadable, a field is missing, or `kv_dtype` is unknown.
        UnsupportedError: the architecture's cache is not known.
    """
    check_config(directory)
    config, tensors = read_config(directory), tuple(read_headers(directory).values())
    shape = read_shape(config)
    tied = _is_tied(config, tensors)
    unique = tuple(tensor for tensor in tensors if not (tied and part_of(tensor.name) == "head"))
    dtype = _dtype(config, unique)
    by_part = {part: tuple(tensor for tensor in unique if part_of(tensor.name) == part) for part in PARTS}
    return ModelFacts(
        architecture=_architecture(config),
        model_type=shape.model_type,
        num_parameters=sum(tensor.num_parameters for tensor in unique),
        num_linear_parameters=sum(tensor.num_parameters for tensor in unique if is_linear(tensor)),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position=shape.max_position,
        tied_head=tied,
        dtype=dtype,
        parameters_by_part={part: sum(tensor.num_parameters for tensor in group) for part, group in by_part.items()},
        bytes_by_part={part: sum(tensor.num_bytes for tensor in group) for part, group in by_part.items()},
        flop_per_token=2 * _multiplied(shape, unique),
        flop_per_token_per_context=4 * shape.num_layers * shape.num_heads * shape.head_dim,
        kv=kv_layers(shape, value_bytes(kv_dtype or dtype)),
    )


def value_bytes(dtype: str) -> int:
    """Return the size of one value.

    Raises:
        ConfigError: the type is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown type {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _multiplied(shape: ModelShape, tensors: tuple[TensorHeader, ...]) -> int:
    """Return how many weights one token is multiplied with: linears (visited experts only) and the head, tied or not."""
    linears = [tensor for tensor in tensors if is_linear(tensor)]
    dense = sum(tensor.num_parameters for tensor in linears if not is_expert(tensor.name))
    experts = sum(tensor.num_parameters for tensor in linears if is_expert(tensor.name))
    return dense + round(experts * shape.expert_share) + shape.vocab_size * shape.hidden_size


def _is_tied(config: dict[str, object], tensors: tuple[TensorHeader, ...]) -> bool:
    """Return whether head and embedding are one matrix: as stated, else because no head is stored."""
    stated = config.get("tie_word_embeddings")
    return stated if isinstance(stated, bool) else not any(part_of(tensor.name) == "head" for tensor in tensors)


def _dtype(config: dict[str, object], tensors: tuple[TensorHeader, ...]) -> str:
    """Return the type that most bytes are stored in; what config.json states is only a wish."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in _DTYPES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_parameters * ITEM_BITS[tensor.dtype]
    if sizes:
        return _DTYPES[max(sizes, key=lambda name: sizes[name])]
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _architecture(config: dict[str, object]) -> str:
    """Return the class: as stated, else what transformers builds for the model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")), "unknown"))
