"""The seam where attention over pages plugs in.

Shape letters: T tokens of the step, H query heads, K KV heads, D head dimension.
"""

from typing import Protocol

import torch

from model_optimizer.memory.kv_storage import KvStorage
from model_optimizer.registry import Registry
from model_optimizer.runtimes.torch.batch import FlatBatch


class AttentionKernel(Protocol):
    """Attention of a flat step over pages that already hold its own keys and values; one file of `attentions/` each."""

    def __call__(
        self, query_THD: torch.Tensor, batch: FlatBatch, storage: KvStorage, *, layer: int, window: int | None
    ) -> torch.Tensor:
        """Return softmax(q k^T / sqrt(D)) v per token over what it sees, [T, H, D]."""


ATTENTIONS: Registry[AttentionKernel] = Registry("attention kernel", "model_optimizer.runtimes.torch.attentions")
