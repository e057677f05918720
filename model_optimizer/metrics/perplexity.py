"""Perplexity: exp of the mean negative log-probability of a text, every token counted once."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import METRICS, Metric, TokenScores


class Window(NamedTuple):
    """Tokens `start:end` of a text are fed; of these, the ones from index `score_from` (in the window) on are scored."""

    start: int
    end: int
    score_from: int


def windows(num_tokens: int, length: int, overlap: int) -> tuple[Window, ...]:
    """Cut a text into windows of at most `length` tokens whose first `overlap` tokens are context only.

    Law: the scored positions of all windows are exactly 1, 2, ..., num_tokens - 1, each once (the first token has no context and
    cannot be scored).

    Raises:
        ConfigError: unless num_tokens >= 2 and 1 <= overlap < length.
    """
    if num_tokens < 2 or not 1 <= overlap < length:
        raise ConfigError(f"windows need num_tokens >= 2 and 1 <= overlap < length; seen: {num_tokens}, {overlap}, {length}")
    found, scored = [Window(0, min(length, num_tokens), 1)], min(length, num_tokens)
    while scored < num_tokens:
        start = scored - overlap
        end = min(start + length, num_tokens)
        found.append(Window(start, end, overlap))
        scored = end
    return tuple(found)


def rolling_windows(num_tokens: int, length: int, stride: int) -> tuple[Window, ...]:
    """Cut a text into windows of which a model reads at most `length` tokens at once, each `stride` tokens after the last.

    A window holds one token more than is read: the last is only predicted. So no window loses its first prediction, even
    where the stride is the length and nothing overlaps.

    Law: the scored positions of all windows are exactly 1, 2, ..., num_tokens - 1, each once, whatever length and stride.

    Raises:
        ConfigError: unless num_tokens >= 2 and 1 <= stride <= length.
    """
    if num_tokens < 2 or not 1 <= stride <= length:
        raise ConfigError(
            f"perplexity needs 2 tokens or more and 1 <= stride <= max length; seen: {num_tokens} tokens, stride {stride}, max "
            f"length {length}"
        )
    found, scored = [Window(0, min(length + 1, num_tokens), 1)], min(length, num_tokens - 1)
    while scored < num_tokens - 1:
        end = min(scored + 1 + stride, num_tokens)
        start = max(0, end - 1 - length)
        found.append(Window(start, end, scored + 1 - start))
        scored = end - 1
    return tuple(found)


def perplexity(log_probs_T: NDArray[np.float32]) -> float:
    """Return exp(-mean log p); lower is better, 1 is certainty.

    Source: Jelinek et al., Perplexity - a measure of the difficulty of speech recognition tasks, 1977.

    Raises:
        ConfigError: no tokens.
    """
    if log_probs_T.size == 0:
        raise ConfigError("perplexity needs at least one scored token; seen: none")
    return math.exp(-float(log_probs_T.mean(dtype=np.float64)))


METRICS.register("perplexity")(
    Metric[TokenScores](
        unit="perplexity",
        higher_is_better=False,
        lower_bound=1.0,
        upper_bound=math.inf,
        compute=lambda scores: perplexity(scores.log_probs_T),
        example=lambda seed: TokenScores(-np.random.default_rng(seed).exponential(2.0, 40).astype(np.float32)),
    )
)
