"""Who reads whose channels in a decoder block: where a scale or a rotation may move from one tensor into another.

Found by module names and shapes, and confirmed by what modules compute: a norm counts only once it was seen to multiply by
its weight (Llama and kin) or by one more than it (Gemma). What cannot be confirmed is refused by name.

Shape letters: D hidden features, O output features, I input features.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.model_config import read_config
from model_optimizer.models.headers import read_headers
from model_optimizer.quantization.blocks import find_stack
from model_optimizer.quantization.layers import read_layers

_ATTENTION_READERS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_MLP_READERS = (("gate_proj", "up_proj"), ("gate_up_proj",))
_MLP_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm")
"""The norm in front of the MLP: Gemma's first, for its `post_attention_layernorm` lies elsewhere."""
NORM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm that multiplies channels by `offset` + its weight."""

    name: str
    offset: float

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"


@dataclass(frozen=True, slots=True)
class Rows:
    """Outputs `start` to `stop` of a linear layer."""

    layer: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Edge:
    """Channels on their way from a norm or from rows of a linear layer to the layers that read them, and to no others."""

    source: Norm | Rows
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of one block: v's rows are read by o's columns, `num_heads // num_kv_heads` heads each."""

    values: Rows
    output: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Block:
    """What may be folded in one decoder block."""

    name: str
    edges: tuple[Edge, ...]
    heads: Heads
    writers: tuple[str, ...]
    """Linear layers whose outputs are added to the residual stream."""
    odd: tuple[str, ...]
    """Modules with weights that are none of the above: a rotation of the residual stream may not pass them."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A decoder whose blocks are understood."""

    blocks: tuple[Block, ...]
    embedding: str
    head: str
    final_norm: Norm
    tied: bool
    hidden_size: int
    biases: frozenset[str]
    """Layers with a bias."""


def read_anatomy(directory: Path) -> Anatomy:
    """Return the anatomy of a model from its config alone; no weight is read.

    Raises:
        UnsupportedError: a part is missing, or a norm is not of the known kinds; it is named.
    """
    layers = read_layers(directory).linears
    config = read_config(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    stack = find_stack(layers).name
    head_names = _head_counts(directory)
    blocks = tuple(_block(f"{stack}.{number}", modules, head_names) for number in range(len(list(modules[stack].children()))))
    embedding, head = names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]
    return Anatomy(
        blocks=blocks,
        embedding=embedding,
        head=head,
        final_norm=_final_norm(model, modules, stack, embedding, head),
        tied=bool(config.tie_word_embeddings) or f"{head}.weight" not in read_headers(directory),
        hidden_size=_width(model.get_input_embeddings()),
        biases=frozenset(name for name, module in modules.items() if isinstance(module, nn.Linear) and module.bias is not None),
    )


def _width(embedding: nn.Module) -> int:
    assert isinstance(embedding, nn.Embedding), "causal language models embed with torch.nn.Embedding"
    return embedding.embedding_dim


def _head_counts(directory: Path) -> tuple[int, int]:
    settings = read_config(directory).to_dict()
    if "num_attention_heads" not in settings:
        raise UnsupportedError(
            f"{settings.get('model_type')} models are not built like Llama (no num_attention_heads in config.json), so that "
            "nothing can be folded; use method rtn or gptq without rotation"
        )
    num_heads = int(settings["num_attention_heads"])
    return num_heads, int(settings.get("num_key_value_heads") or num_heads)


def _block(name: str, modules: Mapping[str, nn.Module], head_counts: tuple[int, int]) -> Block:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    input_norm = _norm(f"{name}.input_layernorm", modules)
    mlp_norm_name = next((leaf for leaf in _MLP_NORMS if f"{name}.{leaf}" in modules), _MLP_NORMS[-1])
    mlp_norm = _norm(f"{name}.{mlp_norm_name}", modules)
    of_attention = _family(attention, _ATTENTION_READERS, modules)
    of_mlp = _family(mlp, _MLP_READERS, modules)
    heads = _heads(attention, of_attention, modules, head_counts)
    down = f"{mlp}.down_proj"
    up = _linear(of_mlp[-1], modules)
    width = _linear(down, modules).in_features
    edges = [Edge(input_norm, of_attention)]
    if heads.num_heads == heads.num_kv_heads:
        edges.append(Edge(heads.values, (heads.output,)))
    edges += [
        Edge(mlp_norm, of_mlp),
        Edge(Rows(of_mlp[-1], up.out_features - width, up.out_features), (down,)),
    ]
    known = {input_norm.name, mlp_norm.name, *of_attention, *of_mlp, heads.output, down}
    odd = tuple(
        other
        for other, module in modules.items()
        if other.startswith(f"{name}.") and other not in known and _reads_hidden(module, attention, other)
    )
    return Block(name, tuple(edges), heads, (heads.output, down), odd)


def _reads_hidden(module: nn.Module, attention: str, name: str) -> bool:
    """Return whether a module has weights of its own beside the residual stream; norms inside attention work per head."""
    return not name.startswith(attention) and next(module.parameters(recurse=False), None) is not None


def _family(parent: str, families: tuple[tuple[str, ...], ...], modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    for leaves in families:
        found = tuple(f"{parent}.{leaf}" for leaf in leaves)
        if all(name in modules for name in found):
            for name in found:
                _linear(name, modules)
            return found
    wanted = " or ".join("/".join(leaves) for leaves in families)
    raise UnsupportedError(f"{parent} has no {wanted}, so no scale or rotation can be folded there; use method rtn or gptq")


def _linear(name: str, modules: Mapping[str, nn.Module]) -> nn.Linear:
    module = modules.get(name)
    if not isinstance(module, nn.Linear):
        seen = type(module).__name__ if module else "absent"
        raise UnsupportedError(f"{name} is {seen}, a torch.nn.Linear is needed to fold into; use method rtn or gptq")
    return module


def _heads(attention: str, readers: tuple[str, ...], modules: Mapping[str, nn.Module], head_counts: tuple[int, int]) -> Heads:
    output = f"{attention}.o_proj"
    num_heads, num_kv_heads = head_counts
    head_dim = _linear(output, modules).in_features // num_heads
    rows = _linear(readers[-1], modules).out_features
    return Heads(Rows(readers[-1], rows - num_kv_heads * head_dim, rows), output, num_heads, num_kv_heads, head_dim)


def _norm(name: str, modules: Mapping[str, nn.Module]) -> Norm:
    """Return a norm once it was seen to compute x / rms(x) times offset + weight."""
    module = modules.get(name)
    if module is None:
        raise UnsupportedError(f"{name} does not exist, so nothing can be folded into it; use method rtn or gptq")
    parameters = dict(module.named_parameters())
    if set(parameters) != {"weight"}:
        raise UnsupportedError(f"{name} has {', '.join(parameters) or 'no weight'}, only a weight can be folded; use rtn or gptq")
    inputs_ND = torch.randn(4, len(parameters["weight"]), generator=torch.Generator().manual_seed(0)) + 0.5
    plain_ND = inputs_ND / inputs_ND.square().mean(-1, keepdim=True).sqrt()
    zero_ND, one_ND = (_output(module, value, inputs_ND) for value in (0.0, 1.0))
    for offset in (0.0, 1.0):
        expected = ((zero_ND, offset * plain_ND), (one_ND, (offset + 1) * plain_ND))
        if all(torch.allclose(seen, wanted, atol=NORM_TOLERANCE, rtol=NORM_TOLERANCE) for seen, wanted in expected):
            return Norm(name, offset)
    kind = type(module).__name__
    raise UnsupportedError(f"{name} ({kind}) is no root-mean-square norm with one weight per channel; use method rtn or gptq")


def _output(module: nn.Module, weight: float, inputs_ND: torch.Tensor) -> torch.Tensor:
    real = copy.deepcopy(module).to_empty(device="cpu").float()
    with torch.no_grad():
        real.get_parameter("weight").fill_(weight)
        outputs_ND: torch.Tensor = real(inputs_ND)
    return outputs_ND


def _final_norm(model: PreTrainedModel, modules: Mapping[str, nn.Module], stack: str, embedding: str, head: str) -> Norm:
    around = [name for name in modules if not name.startswith(f"{stack}.") and name not in (embedding, head)]
    found = [name for name in around if next(modules[name].parameters(recurse=False), None) is not None]
    if len(found) != 1:
        raise UnsupportedError(
            f"{type(model).__name__} has {', '.join(found) or 'no norm'} around its blocks, where one final norm is covered; "
            "use method rtn or gptq"
        )
    return _norm(found[0], modules)
