"""Keys and values of every layer in pages: the numbers behind a `KvPool`, which decides who may write where.

Letters: T tokens, H KV heads, D dimension of a head, P pages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_optimizer.memory.kv_layout import SCALED, KvLayout
from model_optimizer.memory.kv_pages import GRIDS, FloatPages, Pages, ScaledPages
from model_optimizer.memory.kv_pool import KvPool

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class KvStorage:
    """Pages of all layers, allocated at once; `num_bytes` is `layout.pool_bytes(num_pages)`."""

    def __init__(self, layout: KvLayout, num_pages: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.device = torch.device(device)
        self.compute_dtype = _FLOATS[layout.compute_dtype]
        self._keys = [self._pages(layer.num_kv_heads, layer.key_dim) for layer in layout.layers]
        self._values = [self._pages(layer.num_kv_heads, layer.value_dim) for layer in layout.layers]

    def write(self, layer: int, slots_T: Tensor, keys_THD: Tensor, values_THD: Tensor) -> None:
        """Write tokens into slots (page x page_tokens + offset), distinct ones; of a new page the first slot before others."""
        self._keys[layer].write(slots_T, keys_THD)
        if self.layout.layers[layer].value_dim:
            self._values[layer].write(slots_T, values_THD)

    def read(self, layer: int, pages: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return keys and values [P * page_tokens, H, D] of pages in their order, in the compute type.

        A tensor of page numbers [B, P] gives [B, P * page_tokens, H, D]. Slots that nobody wrote hold anything; in debug
        mode they are not a number, so mask them before a product (0 x NaN is NaN).
        """
        pages_P = torch.as_tensor(pages, dtype=torch.long, device=self.device)
        return self._keys[layer].read(pages_P, self.compute_dtype), self._values[layer].read(pages_P, self.compute_dtype)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages of all layers, (source, target) pairs in their order."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        if len(set(targets)) < len(targets) or set(sources) & set(targets):
            steps = [((source,), (target,)) for source, target in pairs]
        else:
            steps = [(sources, targets)]
        for source, target in steps:
            sources_P, targets_P = self._numbers(source), self._numbers(target)
            for pages in self._all():
                pages.copy(sources_P, targets_P)

    def poison(self, pages: Sequence[int]) -> None:
        """Make every value of these pages not a number, until they are written again from their first slot."""
        pages_P = self._numbers(pages)
        for each in self._all():
            each.poison(pages_P)

    def resize(self, num_pages: int) -> None:
        """Keep the first `num_pages` pages and add empty ones up to that; needs one layer's keys twice meanwhile."""
        for pages in self._all():
            pages.resize(num_pages)
        self.num_pages = num_pages

    @property
    def num_bytes(self) -> int:
        return sum(pages.num_bytes for pages in self._all())

    def _pages(self, num_heads: int, dim: int) -> Pages:
        shape = (self.num_pages, self.layout.page_tokens, num_heads if dim else 0, dim)
        if self.layout.precision in SCALED:
            return ScaledPages(shape, GRIDS[self.layout.precision], self.device)
        return FloatPages(shape, _FLOATS[self.layout.precision], self.device)

    def _all(self) -> list[Pages]:
        return [*self._keys, *self._values]

    def _numbers(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.long, device=self.device)


def resize(pool: KvPool, storage: KvStorage, num_pages: int) -> None:
    """Change pool and storage together; live pages move down before the storage is cut.

    Raises:
        PoolExhausted: more pages are in use than would be left; nothing was changed.
    """
    if num_pages > pool.num_pages:
        storage.resize(num_pages)
        pool.resize(num_pages)
    elif num_pages < pool.num_pages:
        storage.copy(pool.resize(num_pages))
        storage.resize(num_pages)
