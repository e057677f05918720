"""Which layers keep which cache: multi-head, grouped, multi-query, latent, sliding, shared; from config.json alone.

The pipeline refuses caches that its runtimes do not hold (`models.shape`); a budget can be computed for them all the same.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from model_optimizer.memory.budget import pages_for
from model_optimizer.memory.kv_layout import KvLayerShape, KvLayout
from model_optimizer.models.shape import ModelShape, read_shape

_OTHER_CACHES = ("model_type", "kv_lora_rank", "num_kv_shared_layers")
"""What `read_shape` refuses, or completes with refused defaults; it is read here instead."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that keep the same cache."""

    layer_type: str
    """`full_attention`, `sliding_attention`, ..."""
    num_layers: int
    layer: KvLayerShape
    window: int | None
    """Tokens that a sliding layer looks back; None = all."""


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The caches of a decoder."""

    attention: str
    """`MHA`, `GQA`, `MQA` or `MLA`."""
    groups: tuple[KvGroup, ...]
    num_shared_layers: int
    """Layers without a cache of their own: they read an earlier layer's."""

    def layout(self, page_tokens: int, precision: str, compute_dtype: str = "float32") -> KvLayout:
        """Return the layout of a storage that keeps every token of every caching layer."""
        layers = tuple(group.layer for group in self.groups for _ in range(group.num_layers))
        return KvLayout(layers, page_tokens, precision, compute_dtype)

    def request_bytes(self, num_tokens: int, page_tokens: int, precision: str) -> int:
        """Return the pages of one request in a storage that keeps every token."""
        return self.layout(page_tokens, precision).pool_bytes(pages_for(num_tokens, page_tokens))

    def windowed_request_bytes(self, num_tokens: int, page_tokens: int, precision: str) -> int:
        """Return the same where sliding layers drop pages that lie wholly behind their window.

        Such a layer holds at most the window's pages and one more, since a window seldom starts where a page does.
        """
        total = 0
        for group in self.groups:
            pages = pages_for(num_tokens, page_tokens)
            if group.window is not None:
                pages = min(pages, pages_for(group.window, page_tokens) + 1)
            total += KvLayout((group.layer,) * group.num_layers, page_tokens, precision).pool_bytes(pages)
        return total


def read_geometry(stated: Mapping[str, object]) -> tuple[ModelShape, KvGeometry]:
    """Return a decoder's dimensions and its caches.

    A latent cache holds, per token and layer, the compressed vector and the rotary key, shared by all heads. Source: DeepSeek-V2
    (arXiv 2405.04434), section 2.1, (d_c + d_h^R) per token and layer. Of layers that share, the last `num_kv_shared_layers`
    have none. Source: transformers, Gemma3n, `first_kv_shared_layer_idx`.

    Raises:
        ConfigError: a field is missing.
        UnsupportedError: a nested or non-attention decoder.
    """
    config = _completed(stated)
    shape = read_shape({name: value for name, value in config.items() if name not in _OTHER_CACHES})
    latent, rotary, shared = (_count(config, name) for name in ("kv_lora_rank", "qk_rope_head_dim", "num_kv_shared_layers"))
    if latent:
        attention, layer = "MLA", KvLayerShape(1, latent + rotary, 0)
    else:
        layer = KvLayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim)
        attention = "MHA" if shape.num_kv_heads == shape.num_heads else "MQA" if shape.num_kv_heads == 1 else "GQA"
    caching = Counter(shape.layer_types[: shape.num_layers - shared])
    groups = tuple(
        KvGroup(kind, count, layer, None if kind == "full_attention" else shape.window) for kind, count in caching.items()
    )
    return shape, KvGeometry(attention, groups, shared)


def _completed(stated: Mapping[str, object]) -> dict[str, object]:
    """Return the config with what its class fills in, where transformers knows the class."""
    from transformers import CONFIG_MAPPING

    model_type = stated.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return dict(stated)
    complete: dict[str, object] = CONFIG_MAPPING[model_type].from_dict(dict(stated)).to_dict()
    return complete


def _count(config: Mapping[str, object], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
