"""Teacher-forced scores and full logits over any decoder model, in pieces that bound the logits' memory.

Rows are padded on the right: a causal model never looks there, so no row depends on its batch mates.

Shape letters: B rows, N positions, S positions of a piece, P cached plus new tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from model_optimizer.protocols import TokenBatch, TokenLogProbs
from model_optimizer.runtimes.decoder_model import C, DecoderModel, ModelInput

LOGITS_BYTES = 256 * 2**20
"""Largest block of logits that is held at once."""
_LSE_ROWS = 64
"""Rows of logits exponentiated at once; bounds the temporary to a few per cent of the block."""


def score_batch(model: DecoderModel[C], batch: TokenBatch) -> list[TokenLogProbs]:
    """Return log p(token[t] | token[:t]) for t >= score_from of every sequence, in the batch's order."""
    scores = [TokenLogProbs(np.empty(0, np.float32), np.empty(0, np.bool_)) for _ in batch.tokens]
    for group in _groups(model.vocab_size, batch):
        sequences = [batch.tokens[index] for index in group]
        first = min(batch.score_from[index] for index in group)
        pieces = [_score_piece(logits_BSV, start, sequences) for start, logits_BSV in _pieces(model, sequences, first - 1)]
        for row, index in enumerate(group):
            log_probs = np.concatenate([piece[row].log_probs for piece in pieces])
            is_greedy = np.concatenate([piece[row].is_greedy for piece in pieces])
            skip = batch.score_from[index] - first
            scores[index] = TokenLogProbs(log_probs[skip:], is_greedy[skip:])
    return scores


def full_logits(model: DecoderModel[C], tokens: tuple[int, ...]) -> NDArray[np.float32]:
    """Return logits of one sequence, float32 [T, V]."""
    pieces = [logits_BSV[0] for _, logits_BSV in _pieces(model, [(*tokens, 0)], 0)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def log_sum_exp(logits_NV: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return log(sum(exp(logits))) of every row, float32 [N]."""
    out_N = np.empty(len(logits_NV), np.float32)
    for start in range(0, len(logits_NV), _LSE_ROWS):
        block_NV = logits_NV[start : start + _LSE_ROWS]
        peak_N1 = block_NV.max(axis=-1, keepdims=True)
        out_N[start : start + _LSE_ROWS] = peak_N1[:, 0] + np.log(np.exp(block_NV - peak_N1).sum(axis=-1))
    return out_N


def _groups(vocab_size: int, batch: TokenBatch) -> Iterator[list[int]]:
    """Yield indices of sequences of similar length whose logits fit together; what has nothing to score is left out."""
    indices = [index for index, tokens in enumerate(batch.tokens) if batch.score_from[index] < len(tokens)]
    group: list[int] = []
    for index in sorted(indices, key=lambda index: len(batch.tokens[index])):
        if group and (len(group) + 1) * len(batch.tokens[index]) * vocab_size * 4 > LOGITS_BYTES:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _pieces(
    model: DecoderModel[C], sequences: Sequence[tuple[int, ...]], first: int
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (start, logits [B, S, V]) from position `first` to the one before the last, in order."""
    lengths_B1 = np.array([[len(tokens) - 1] for tokens in sequences], np.int64)
    end = int(lengths_B1.max())
    input_ids_BP = np.array([(*tokens[:-1], *[0] * (end + 1 - len(tokens))) for tokens in sequences], np.int64)
    step = max(1, LOGITS_BYTES // (len(sequences) * model.vocab_size * 4))
    cache, done = None, 0
    for start in range(first, end, step):
        stop = min(start + step, end)
        columns_P = np.arange(stop, dtype=np.int64)
        mask_BP = (columns_P < lengths_B1).astype(np.int64)
        positions_BS = np.broadcast_to(columns_P[done:], (len(sequences), stop - done)).copy()
        logits_BSV, cache = model.forward(
            ModelInput(input_ids_BP[:, done:stop], mask_BP, positions_BS, logits_from=start - done), cache
        )
        yield start, logits_BSV
        done = stop


def _score_piece(logits_BSV: NDArray[np.float32], start: int, sequences: Sequence[tuple[int, ...]]) -> list[TokenLogProbs]:
    """Score the tokens that the piece's positions predict, row by row."""
    scores = []
    for logits_SV, tokens in zip(logits_BSV, sequences, strict=True):
        targets_N = np.array(tokens[start + 1 : start + 1 + len(logits_SV)], np.int64)
        logits_NV = logits_SV[: len(targets_N)]
        log_probs_N = np.take_along_axis(logits_NV, targets_N[:, None], axis=-1)[:, 0] - log_sum_exp(logits_NV)
        scores.append(TokenLogProbs(log_probs_N.astype(np.float32), logits_NV.argmax(axis=-1) == targets_N))
    return scores
