"""What a backend brings: one forward pass over a padded batch with an explicit cache, and cache surgery.

Shape letters: B rows, S new tokens, P cached plus new tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One padded batch; `attention_mask_BP` is 1 on real tokens and 0 on padding."""

    input_ids_BS: NDArray[np.int64]
    attention_mask_BP: NDArray[np.int64]
    position_ids_BS: NDArray[np.int64]
    logits_from: int = 0
    """First of the S positions whose logits are wanted."""


class DecoderModel(Protocol[C]):
    """A loaded model with an explicit cache `C`, whose rows are sequences and whose columns are tokens."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    def forward(self, batch: ModelInput, cache: C | None) -> tuple[NDArray[np.float32], C]:
        """Return logits, float32 [B, S - logits_from, V], and the cache grown by S columns; `cache` is spent."""

    def select(self, cache: C, rows: Sequence[int], first_column: int) -> C:
        """Keep the given rows, and their columns from `first_column` on."""

    def join(self, caches: Sequence[C]) -> C:
        """Stack rows of several caches, shorter ones padded on the left with zeros."""

    def cache_bytes(self, cache: C) -> int: ...
    def close(self) -> None: ...


def stack_columns(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return rows [B, heads, columns, head dimension] of several caches one below the other, padded on the left with zeros."""
    width = max(part.shape[2] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, 0), (width - part.shape[2], 0), (0, 0))) for part in parts])
