"""What config.json states about sizes, checked alone and against the tensors: in milliseconds, without torch or transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.models.headers import TensorHeader
from model_optimizer.models.parts import part_of
from model_optimizer.models.shape import ALIASES

Config = Mapping[str, object]
PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose every tensor's shape follows from a few fields in one and the same way."""
CLASS_DEFAULTS: dict[str, dict[str, int]] = {
    "mistral": {"num_kv_heads": 8},
    "qwen2": {"num_kv_heads": 32},
    "qwen3": {"num_kv_heads": 32, "head_dim": 128},
}
"""What transformers fills in for an absent field where it is no function of the others; a test holds it to the classes."""
REQUIRED = ("num_layers", "hidden_size", "num_heads", "vocab_size")
DERIVED = ("num_kv_heads", "intermediate_size", "max_position")
FLOATING = ("F64", "F32", "F16", "BF16")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes as config.json means them."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int | None
    max_position: int | None
    tied_head: bool | None


def is_native(model_type: str) -> bool:
    """Return whether the installed transformers brings this architecture; asked of its files, for importing it takes seconds."""
    spec, name = find_spec("transformers"), model_type.replace("-", "_")
    folders = spec.submodule_search_locations if spec else None
    if folders and name.isidentifier() and (Path(folders[0]) / "models" / name / f"modeling_{name}.py").is_file():
        return True
    from transformers import CONFIG_MAPPING  # the few whose folder is named otherwise

    return model_type in CONFIG_MAPPING


def read_dimensions(config: Config, path: Path) -> Dimensions:
    """Return the sizes that a config states, derived where they may be left out.

    Raises:
        ConfigError: a field is missing, is no positive whole number, or contradicts another.
        UnsupportedError: the model is not a plain text decoder.
    """
    if isinstance(config.get("text_config"), dict):
        raise UnsupportedError(f"{path} describes a model with a nested text_config; only text decoders are supported")
    model_type = _model_type(config, path)
    values = {name: _stated(config, name, path) for name in (*REQUIRED, *DERIVED)}
    for name in REQUIRED:
        if values[name] is None:
            raise ConfigError(f"{path}: missing field for {name}; accepted: {', '.join(ALIASES[name])}")
    num_layers, hidden_size, num_heads, vocab_size = (values[name] or 0 for name in REQUIRED)
    defaults = CLASS_DEFAULTS.get(model_type, {})
    head_dim = _positive(config, "head_dim", path) or defaults.get("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise ConfigError(
            f"{path}: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}, and head_dim is not stated; "
            "state head_dim or mend one of the two"
        )
    num_kv_heads = values["num_kv_heads"] or defaults.get("num_kv_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}, so that query heads "
            "cannot share them evenly; mend one of the two"
        )
    _check_rotary(config, path)
    tied = config.get("tie_word_embeddings")
    return Dimensions(
        model_type=model_type,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or hidden_size // num_heads,
        vocab_size=vocab_size,
        intermediate_size=values["intermediate_size"],
        max_position=values["max_position"],
        tied_head=tied if isinstance(tied, bool) else None,
    )


def _model_type(config: Config, path: Path) -> str:
    """Return the model type, which every class is found by; `architectures` may be absent, for it follows from the type."""
    model_type, named = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"{path}: model_type is missing; it names the architecture, e.g. 'llama'")
    if not is_native(model_type):
        raise UnsupportedError(
            f"{path}: model type {model_type!r} is not known to the installed transformers, and code from a model's author "
            "is never executed; use a built-in architecture"
        )
    if named is not None and (not isinstance(named, list) or not all(isinstance(name, str) for name in named)):
        raise ConfigError(f"{path}: architectures is {named!r}; allowed: a list of class names, or nothing")
    if isinstance(named, list) and named and not any("CausalLM" in name or "LMHead" in name for name in named):
        raise UnsupportedError(f"{path}: architectures is {named[0]}, which does not generate text; only causal language models")
    return model_type


def _stated(config: Config, name: str, path: Path) -> int | None:
    """Return the first alias that is stated at all; null counts as absent."""
    return next((value for alias in ALIASES[name] if (value := _positive(config, alias, path)) is not None), None)


def _positive(config: Config, field: str, path: Path) -> int | None:
    value = config.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{path}: {field} is {value!r}; allowed: a positive whole number")
    return value


def _check_rotary(config: Config, path: Path) -> None:
    """Refuse old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`) fields that are malformed or disagree."""
    for field in ("rope_scaling", "rope_parameters"):
        section = config.get(field)
        if section is not None and not isinstance(section, dict):
            raise ConfigError(f"{path}: {field} is {section!r}; allowed: an object with rope_type and its numbers, or nothing")
    old, parameters = config.get("rope_theta"), config.get("rope_parameters")
    new = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    for value in (old, new):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ConfigError(f"{path}: rope_theta is {value!r}; allowed: a positive number")
    if old is not None and new is not None and old != new:
        raise ConfigError(f"{path}: rope_theta is {old}, rope_parameters.rope_theta is {new}; leave one of them out")


def check_tensors(dimensions: Dimensions, tensors: Mapping[str, TensorHeader], path: Path) -> None:
    """Refuse weights that are no floating-point numbers or whose shapes are not those that the config asks for.

    Raises:
        ConfigError: names the tensors, what is stored and what the config says.
    """
    for tensor in tensors.values():
        if tensor.dtype not in FLOATING and tensor.name.endswith(".weight"):
            raise ConfigError(
                f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}, which is not the full-precision model; "
                f"allowed: {', '.join(FLOATING)}"
            )
        if part_of(tensor.name) == "embedding" and tensor.shape[0] != dimensions.vocab_size and _is_table(tensor):
            raise ConfigError(
                f"{path}: vocab_size is {dimensions.vocab_size}, {tensor.name} has {tensor.shape[0]} rows; "
                "config and weights are of different models, or the config was not saved after resizing"
            )
    if dimensions.model_type not in PLAIN_FAMILIES or dimensions.intermediate_size is None:
        return
    expected = expected_shapes(dimensions, untied="lm_head.weight" in tensors or dimensions.tied_head is False)
    if absent := sorted(expected.keys() - tensors.keys()):
        raise ConfigError(f"{path.parent} lacks {_some(absent)}; config.json asks for {dimensions.num_layers} layers of them")
    wrong = [name for name, shape in expected.items() if tensors[name].shape != shape]
    if wrong:
        name = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ConfigError(
            f"{tensors[name].file}: {name} has shape {list(tensors[name].shape)}, config.json asks for "
            f"{list(expected[name])}{more}; config and weights are of different models"
        )
    beyond = f"model.layers.{dimensions.num_layers}."
    if extra := [name for name in tensors if name.startswith(beyond)]:
        raise ConfigError(f"{path}: num_hidden_layers is {dimensions.num_layers}, but stored are {_some(extra)}; mend the config")


def expected_shapes(dimensions: Dimensions, *, untied: bool) -> dict[str, tuple[int, ...]]:
    """Return the matrices that a decoder of a plain family must have."""
    hidden, inner = dimensions.hidden_size, dimensions.intermediate_size or 0
    query, kv = dimensions.num_heads * dimensions.head_dim, dimensions.num_kv_heads * dimensions.head_dim
    table = (dimensions.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    if untied:
        shapes["lm_head.weight"] = table
    for layer in range(dimensions.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def _is_table(tensor: TensorHeader) -> bool:
    """Return whether an embedding is that of the tokens, not of the positions."""
    return len(tensor.shape) == 2 and "position" not in tensor.name and ".wpe." not in f".{tensor.name}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
