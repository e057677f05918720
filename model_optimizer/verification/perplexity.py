"""Perplexity of a whole text with a runtime, every token counted once whatever the window."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import ConfigError
from model_optimizer.metrics.perplexity import perplexity, rolling_windows
from model_optimizer.protocols import Progress, Runtime, TokenBatch

BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Windowing:
    """How a text is cut."""

    max_length: int
    stride: int
    bos: int | None = None
    """Token put before the text."""


class PerplexityResult(Frozen):
    """A perplexity with everything that it depends on."""

    perplexity: float
    log_prob_nats: float
    """Of the whole text."""
    num_scored: int
    """Tokens predicted: all but the first, and the first as well behind a BOS."""
    num_windows: int
    max_length: int
    """Tokens that the model reads at once."""
    stride: int
    bos: int | None
    """Token put before the text, or None."""


def text_perplexity(runtime: Runtime, tokens: Sequence[int], cut: Windowing, progress: Progress) -> PerplexityResult:
    """Score a text window by window.

    Raises:
        ConfigError: fewer than two tokens, a stride outside 1..max_length, or windows longer than the engine holds.
    """
    text = tuple(tokens) if cut.bos is None else (cut.bos, *tokens)
    windows = rolling_windows(len(text), cut.max_length, cut.stride)
    longest = max(window.end - window.start for window in windows)
    if longest > runtime.facts.max_model_len:
        raise ConfigError(
            f"windows of {cut.max_length} tokens and the predicted one need {longest}, and the engine holds "
            f"{runtime.facts.max_model_len}; lower --max-length"
        )
    step = max(1, BATCH_TOKENS // longest)
    batches = [windows[start : start + step] for start in range(0, len(windows), step)]
    scores = []
    for batch in progress.track(batches, "perplexity", len(batches)):
        pieces = tuple(text[window.start : window.end] for window in batch)
        scored = runtime.score(TokenBatch(pieces, tuple(window.score_from for window in batch)))
        scores += [found.log_probs for found in scored]
    log_probs_T = np.concatenate(scores)
    return PerplexityResult(
        perplexity=perplexity(log_probs_T),
        log_prob_nats=float(log_probs_T.sum(dtype=np.float64)),
        num_scored=log_probs_T.size,
        num_windows=len(windows),
        max_length=cut.max_length,
        stride=cut.stride,
        bos=cut.bos,
    )
