"""The shape of a paged KV cache in numbers: what `KvStorage` allocates and what a plan promises, from one place, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from model_optimizer.artifacts.target import ModelFacts
from model_optimizer.errors import ConfigError

KvPrecision = Literal["float32", "float16", "bfloat16", "fp8", "int8"]
SCALE_BYTES = 4
"""A page-local scale is a float32."""
VALUE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}
SCALED = frozenset({"fp8", "int8"})
"""Precisions with a scale per page and head, for keys and for values; fp8 is float8_e4m3fn."""


@dataclass(frozen=True, slots=True)
class KvLayerShape:
    """One layer that keeps a cache. A latent cache (MLA) is one head of keys with values of dimension 0."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def values_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    @property
    def scales_per_page(self) -> int:
        """Return the scales of a page: one a head for keys, one a head for values where there are any."""
        return self.num_kv_heads * ((self.key_dim > 0) + (self.value_dim > 0))


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All layers that keep a cache, in order; a layer that reads another's cache is not among them."""

    layers: tuple[KvLayerShape, ...]
    page_tokens: int
    precision: str = "float32"
    compute_dtype: str = "float32"
    """What `read` returns: `float32`, `float16` or `bfloat16`."""

    def __post_init__(self) -> None:
        if self.precision not in VALUE_BYTES:
            raise ConfigError(f"KV precision {self.precision!r} is unknown; known: {', '.join(VALUE_BYTES)}")
        if self.page_tokens < 1:
            raise ConfigError(f"a page of {self.page_tokens} tokens; give 1 or more")

    @classmethod
    def of(cls, facts: ModelFacts, page_tokens: int, precision: str = "float32", compute_dtype: str = "float32") -> "KvLayout":
        """Return the layout of a decoder whose layers are all alike, as many as its facts count."""
        shape = KvLayerShape(facts.num_kv_heads, facts.head_dim, facts.head_dim)
        return cls((shape,) * sum(layer.num_layers for layer in facts.kv), page_tokens, precision, compute_dtype)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values over all layers, scales aside."""
        return VALUE_BYTES[self.precision] * sum(layer.values_per_token for layer in self.layers)

    @property
    def scale_bytes_per_page(self) -> int:
        return SCALE_BYTES * sum(layer.scales_per_page for layer in self.layers) if self.precision in SCALED else 0

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.bytes_per_token + self.scale_bytes_per_page

    def pool_bytes(self, num_pages: int) -> int:
        """Return what `KvStorage` allocates for so many pages, to the byte."""
        return num_pages * self.page_bytes
