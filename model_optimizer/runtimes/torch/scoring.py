"""Teacher-forced scores and full logits over the native forward pass, on pages of their own that live as long as the call.

Requests that run meanwhile keep theirs. The head is applied to a bounded number of positions at once.

Shape letters: T tokens of a group, R positions scored at once, X hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from model_optimizer.memory.kv_layout import KvLayout
from model_optimizer.memory.kv_storage import KvStorage
from model_optimizer.protocols import TokenBatch, TokenLogProbs
from model_optimizer.runtimes.torch.batch import Ground, Piece, lay_out
from model_optimizer.runtimes.torch.model import Model

GROUP_TOKENS = 2048
"""Tokens of one forward pass; a longer sequence runs alone, in pieces of that many."""
LOGITS_BYTES = 64 * 2**20
"""Largest block of logits that is held at once."""


def score(model: Model, layout: KvLayout, batch: TokenBatch) -> list[TokenLogProbs]:
    """Return log p(token[t] | token[:t]) for t >= score_from of every sequence, in the batch's order."""
    scores = [TokenLogProbs(np.empty(0, np.float32), np.empty(0, np.bool_)) for _ in batch.tokens]
    for members in _groups(batch):
        sequences = [batch.tokens[index][:-1] for index in members]
        hidden_TX = _hidden(model, layout, sequences)
        start = 0
        for index, sequence in zip(members, sequences, strict=True):
            first = batch.score_from[index]
            rows_RX = hidden_TX[start + first - 1 : start + len(sequence)]
            scores[index] = _score_rows(model, rows_RX, batch.tokens[index][first:])
            start += len(sequence)
    return scores


def full_logits(model: Model, layout: KvLayout, tokens: tuple[int, ...]) -> NDArray[np.float32]:
    """Return logits of one sequence, float32 [T, V]."""
    hidden_TX = _hidden(model, layout, [tokens])
    with torch.inference_mode():
        return np.concatenate([model.logits(rows_RX).cpu().numpy() for rows_RX in _blocks(model, hidden_TX)])


def _groups(batch: TokenBatch) -> Iterator[list[int]]:
    """Yield indices of sequences that run together, of similar length; what has nothing to score is left out."""
    indices = [index for index, tokens in enumerate(batch.tokens) if batch.score_from[index] < len(tokens)]
    group: list[int] = []
    for index in sorted(indices, key=lambda index: len(batch.tokens[index])):
        if group and (len(group) + 1) * len(batch.tokens[index]) > GROUP_TOKENS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _hidden(model: Model, layout: KvLayout, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Return the last layer's output of all sequences, one after the other, [T, X]."""
    page_tokens = layout.page_tokens
    counts = [-(-len(tokens) // page_tokens) for tokens in sequences]
    firsts = np.cumsum([0, *counts]).tolist()
    storage = KvStorage(layout, firsts[-1], model.device)
    ground = Ground(page_tokens, model.windows, model.device)
    longest = max(len(tokens) for tokens in sequences)
    blocks = []
    with torch.inference_mode():
        for start in range(0, longest, GROUP_TOKENS):
            pieces = [
                Piece(
                    tokens[start : start + GROUP_TOKENS],
                    start,
                    range(first, first + count),
                    range(first * page_tokens + start, first * page_tokens + min(len(tokens), start + GROUP_TOKENS)),
                )
                for tokens, first, count in zip(sequences, firsts, counts, strict=False)
            ]
            blocks.append(model.hidden(lay_out(pieces, ground), storage))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _blocks(model: Model, rows_RX: torch.Tensor) -> Iterator[torch.Tensor]:
    num_rows = max(1, LOGITS_BYTES // (4 * model.config.shape.vocab_size))
    return iter(rows_RX.split(num_rows))


def _score_rows(model: Model, rows_RX: torch.Tensor, targets: Sequence[int]) -> TokenLogProbs:
    """Score the tokens that the rows predict."""
    log_probs, greedy, done = list[torch.Tensor](), list[torch.Tensor](), 0
    with torch.inference_mode():
        targets_R = torch.tensor(targets, device=model.device)
        for block_RX in _blocks(model, rows_RX):
            logits_RV, wanted_R = model.logits(block_RX), targets_R[done : done + len(block_RX)]
            log_probs.append(logits_RV.gather(1, wanted_R[:, None])[:, 0] - torch.logsumexp(logits_RV, dim=-1))
            greedy.append(logits_RV.argmax(dim=-1) == wanted_R)
            done += len(block_RX)
    return TokenLogProbs(torch.cat(log_probs).cpu().numpy(), torch.cat(greedy).cpu().numpy())
