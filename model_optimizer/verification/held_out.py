"""Perplexity, KL divergence and top-1 flips on text that calibrated nothing, both engines on the same tokens.

Shapes: T positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import ConfigError
from model_optimizer.journal import Journal
from model_optimizer.metrics.kl_divergence import kl_divergence_nats, log_softmax
from model_optimizer.metrics.perplexity import windows
from model_optimizer.metrics.top1_flips import top1_flips
from model_optimizer.protocols import LogitsRuntime, Progress

WINDOW_TOKENS, OVERLAP_TOKENS = 256, 32
"""Bounds the logits in memory: 256 x 49,152 float32 are 48 MiB per engine."""
MAX_TOKENS = 2048
"""Scored in all; about 5 s per engine for a 135 M model on two cores."""


class TextScore(Frozen):
    """Sums over the scored tokens of one text (the unit that is resampled)."""

    text: int
    num_tokens: int
    baseline_log_prob: float
    candidate_log_prob: float
    kl_nats: float
    num_flips: int


@dataclass(frozen=True, slots=True)
class Engines:
    """The two engines under comparison; one object twice where the choice is the baseline."""

    candidate: LogitsRuntime
    baseline: LogitsRuntime

    @property
    def same(self) -> bool:
        return self.candidate is self.baseline


def score_held_out(
    engines: Engines, texts: Sequence[tuple[int, ...]], journal: Journal[TextScore], progress: Progress
) -> tuple[TextScore, ...]:
    """Score texts in order until MAX_TOKENS are reached, continuing where the journal ends.

    Raises:
        ConfigError: no text has two tokens.
    """
    chosen, total = list[tuple[int, tuple[int, ...]]](), 0
    for number, tokens in enumerate(texts):
        if len(tokens) >= 2 and total < MAX_TOKENS:
            chosen.append((number, tokens[: MAX_TOKENS - total + 1]))
            total += len(chosen[-1][1]) - 1
    if not chosen:
        raise ConfigError(
            "no held-out text of two tokens or more; give more calibration text or raise calibration.held_out_ratio"
        )
    done = {record.text for record in journal.records}
    waiting = [entry for entry in chosen if entry[0] not in done]
    for number, tokens in progress.track(waiting, "held-out text", len(waiting)):
        journal.append(_score_text(engines, number, tokens))
    return tuple(journal.records)


def _score_text(engines: Engines, number: int, tokens: tuple[int, ...]) -> TextScore:
    sums = np.zeros(5)
    limit = min(WINDOW_TOKENS, engines.candidate.facts.max_model_len, engines.baseline.facts.max_model_len)
    for start, end, score_from in windows(len(tokens), limit, min(OVERLAP_TOKENS, limit - 1)):
        piece = tokens[start:end]
        baseline_TV = engines.baseline.logits(piece)[score_from - 1 : -1]
        candidate_TV = baseline_TV if engines.same else engines.candidate.logits(piece)[score_from - 1 : -1]
        targets_T = np.array(piece[score_from:])
        sums += [
            len(targets_T),
            _log_prob(baseline_TV, targets_T),
            _log_prob(candidate_TV, targets_T),
            float(kl_divergence_nats(baseline_TV, candidate_TV).sum()),
            int(top1_flips(baseline_TV, candidate_TV).sum()),
        ]
    return TextScore(
        text=number,
        num_tokens=int(sums[0]),
        baseline_log_prob=float(sums[1]),
        candidate_log_prob=float(sums[2]),
        kl_nats=float(sums[3]),
        num_flips=int(sums[4]),
    )


def _log_prob(logits_TV: NDArray[np.float32], targets_T: NDArray[np.int64]) -> float:
    return float(np.take_along_axis(log_softmax(logits_TV), targets_T[:, None], axis=1).sum())
