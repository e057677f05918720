"""A step's tokens of many sequences laid out flat, so that every linear layer runs once over all of them.

For attention, sequences of like length stand together in groups, padded to the longest of the group. Padded queries repeat
their row's last position and padded pages repeat page 0; masks hide both.

Shape letters: T tokens of the step, R rows whose logits are wanted, B sequences of a group, S their longest piece,
P their longest page table, L = P x page_tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_SPREAD = 1.5
"""In a group, no piece and no page table is shorter than the longest over this, so at most a third of a gather is padding."""
_SMALL_PAGES = 4
"""Page tables this short are never split by length."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one sequence has computed in this step: `tokens` at positions `start` and on, in `slots` of the pages."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    slots: Sequence[int]
    num_logits: int = 1
    """How many of its last tokens want logits."""
    num_dropped: int = 0
    """Entries at the front of `pages` that stand for nothing: no token of the piece, nor a later one, sees so far back."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def num_pages(self, page_tokens: int) -> int:
        """Return how many pages attention reads."""
        return -(-self.end // page_tokens) - self.num_dropped


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that attention treats as one padded batch."""

    rows_BS: torch.Tensor
    """int64, where each query lies in the flat step."""
    pages_BP: torch.Tensor
    """int64 page tables."""
    masks_BSL: dict[int | None, torch.Tensor]
    """bool by window: True where the query sees the key."""
    unwritten_BL: torch.Tensor | None
    """bool, True at slots that the row has not written; None where whatever lies there is known to be finite."""
    kept_T: torch.Tensor
    """int64, which of the B x S queries are real ..."""
    target_T: torch.Tensor
    """... and where in the flat step they lie."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One step."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    logits_R: torch.Tensor
    """int64, tokens whose logits are wanted, piece by piece."""
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Ground:
    """What every step of a model shares."""

    page_tokens: int
    windows: Collection[int | None]
    """Attention windows that the model's layers have."""
    device: torch.device


def lay_out(pieces: Sequence[Piece], ground: Ground, *, hide_unwritten: bool = False) -> FlatBatch:
    """Return the step of `pieces`; `hide_unwritten` where slots that nobody wrote may hold NaN, which no mask stops."""
    device = ground.device
    lengths = np.array([len(piece.tokens) for piece in pieces], np.int64)
    ends = np.cumsum(lengths)
    positions_T = np.concatenate([np.arange(piece.start, piece.end) for piece in pieces])
    logits_R = np.concatenate([np.arange(end - piece.num_logits, end) for piece, end in zip(pieces, ends, strict=True)])
    groups = [
        _group([pieces[index] for index in members], (ends - lengths)[members], ground, hide_unwritten)
        for members in _alike(pieces, ground.page_tokens)
    ]
    return FlatBatch(
        torch.tensor([token for piece in pieces for token in piece.tokens], device=device),
        torch.from_numpy(positions_T).to(device),
        torch.tensor([slot for piece in pieces for slot in piece.slots], device=device),
        torch.from_numpy(logits_R).to(device),
        tuple(groups),
    )


def _alike(pieces: Sequence[Piece], page_tokens: int) -> list[list[int]]:
    """Return indices of pieces in groups of like length."""
    sizes = [(len(piece.tokens), piece.num_pages(page_tokens)) for piece in pieces]
    groups: list[list[int]] = []
    most_tokens = fewest = most = 0
    for index in sorted(range(len(pieces)), key=lambda index: sizes[index], reverse=True):
        tokens, pages = sizes[index]
        wider, narrower = max(most, pages), min(fewest, pages)
        if groups and most_tokens <= _SPREAD * tokens and wider <= max(_SPREAD * narrower, _SMALL_PAGES):
            groups[-1].append(index)
            most, fewest = wider, narrower
        else:
            groups.append([index])
            most_tokens, most, fewest = tokens, pages, pages
    return groups


def _group(pieces: Sequence[Piece], first_rows_B: NDArray[np.int64], ground: Ground, hide_unwritten: bool) -> Group:
    page_tokens, device = ground.page_tokens, ground.device
    lengths_B = np.array([len(piece.tokens) for piece in pieces], np.int64)
    num_pages = max(piece.num_pages(page_tokens) for piece in pieces)
    offsets_BS = np.minimum(np.arange(lengths_B.max()), lengths_B[:, None] - 1)
    rows_BS = first_rows_B[:, None] + offsets_BS
    positions_BS = np.array([piece.start for piece in pieces], np.int64)[:, None] + offsets_BS
    pages_BP = np.zeros((len(pieces), num_pages), np.int64)
    for row, piece in zip(pages_BP, pieces, strict=True):
        used = piece.pages[piece.num_dropped : -(-piece.end // page_tokens)]
        row[: len(used)] = used
    kept = np.flatnonzero((np.arange(lengths_B.max()) < lengths_B[:, None]).reshape(-1))
    columns_L = torch.arange(num_pages * page_tokens, device=device)
    query_BS1 = torch.from_numpy(positions_BS).to(device)[..., None]
    if any(piece.num_dropped for piece in pieces):  # a row's first column is its first page's first token
        query_BS1 = query_BS1 - torch.tensor([piece.num_dropped * page_tokens for piece in pieces], device=device)[:, None, None]
    return Group(
        torch.from_numpy(rows_BS).to(device),
        torch.from_numpy(pages_BP).to(device),
        {window: _mask(columns_L, query_BS1, window) for window in ground.windows},
        columns_L > query_BS1[:, -1] if hide_unwritten else None,
        torch.from_numpy(kept).to(device),
        torch.from_numpy(rows_BS.reshape(-1)[kept]).to(device),
    )


def _mask(columns_L: torch.Tensor, query_BS1: torch.Tensor, window: int | None) -> torch.Tensor:
    causal_BSL = columns_L <= query_BS1
    return causal_BSL if window is None else causal_BSL & (columns_L > query_BS1 - window)
