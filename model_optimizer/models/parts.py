"""Which part of a model a tensor belongs to, told from its name and shape."""

import json
import re
from pathlib import Path

from model_optimizer.models.headers import TensorHeader

PARTS = ("attention", "ffn", "embedding", "head", "norm", "other")

_NORM = re.compile(r"(^|\.)(\w*norm\w*|ln_\w+|ln)\.(weight|bias)$")
_HEAD = re.compile(r"^(model\.)?(lm_head|embed_out|output)\.(weight|bias)$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_positions|embed_in|wte|wpe|word_embeddings|tok_embeddings)\.")
_ATTENTION = re.compile(r"(^|\.)(self_attn|attn|attention|self_attention|linear_attn)\.")
_FFN = re.compile(r"(^|\.)(mlp|ffn|feed_forward|block_sparse_moe|experts|fc1|fc2)\.")
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)(\.\w+)?\.weight$")
_EXPERT = re.compile(r"\.experts\.")


def part_of(tensor_name: str) -> str:
    """Return the part, one of `PARTS`."""
    for part, pattern in (("norm", _NORM), ("head", _HEAD), ("embedding", _EMBEDDING), ("attention", _ATTENTION), ("ffn", _FFN)):
        if pattern.search(tensor_name):
            return part
    return "other"


def is_linear(tensor: TensorHeader) -> bool:
    """Return whether a tensor is the weight of a decoder linear (an expert's counts, its router does not)."""
    return (
        len(tensor.shape) == 2
        and tensor.name.endswith(".weight")
        and part_of(tensor.name) in ("attention", "ffn")
        and not _ROUTER.search(tensor.name)
    )


def is_expert(tensor_name: str) -> bool:
    """Return whether a tensor belongs to one of several experts, of which a token visits a few."""
    return _EXPERT.search(tensor_name) is not None


def read_config(directory: Path) -> dict[str, object]:
    """Return config.json as it stands."""
    config: dict[str, object] = json.loads((directory / "config.json").read_bytes())
    return config
