"""Logits become tokens: the likeliest, or a draw that depends on the request's seed and the token's position alone.

    p = softmax(logits / temperature), cut to the top k and then to the fewest whose sum reaches top p
    token = first one, likeliest first, at which the running sum exceeds u x (sum of what is left)

u in [0, 1) comes from a counter-based generator, so a request draws the same tokens alone, in any batch and after preemption.

Shape letters: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model_optimizer.errors import ConfigError
from model_optimizer.protocols import GenerationRequest, Sampling

MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is to be chosen; `position` is that of the new token in its sequence."""

    sampling: Sampling
    position: int
    num_top: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One chosen token with its log-probability in nats, and the likeliest ones if they were wanted."""

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


def check_sampling(request: GenerationRequest, vocab_size: int) -> None:
    """Refuse what cannot be sampled.

    Raises:
        ConfigError: temperature, top_k, top_p or num_top lie outside their range; the message gives it.
    """
    sampling = request.sampling
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise ConfigError(f"temperature is {sampling.temperature}; 0 (greedy) to {MAX_TEMPERATURE:g} is allowed")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"top_p is {sampling.top_p}; more than 0 and at most 1 is allowed")
    if sampling.top_k < 0:
        raise ConfigError(f"top_k is {sampling.top_k}; 0 (all tokens) or more is allowed")
    if not 0 <= request.num_top <= vocab_size:
        raise ConfigError(f"num_top is {request.num_top}; 0 to {vocab_size}, the size of the vocabulary, is allowed")


def choose(logits_RV: torch.Tensor, draws: Sequence[Draw]) -> list[Choice]:
    """Return one token a row; float32 logits. A row that holds NaN gets the log-probability NaN."""
    tokens_R = logits_RV.argmax(dim=-1)
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if drawn:
        tokens_R[drawn] = _sample(logits_RV[drawn], [draws[row] for row in drawn])
    norm_R = torch.logsumexp(logits_RV, dim=-1)
    log_probs_R = logits_RV.gather(1, tokens_R[:, None])[:, 0] - norm_R
    tops = _tops(logits_RV, norm_R, max(draw.num_top for draw in draws))
    return [
        Choice(token, log_prob, tuple(top[: draw.num_top]))
        for token, log_prob, top, draw in zip(tokens_R.tolist(), log_probs_R.tolist(), tops, draws, strict=True)
    ]


def _tops(logits_RV: torch.Tensor, norm_R: torch.Tensor, num_top: int) -> list[list[tuple[int, float]]]:
    if not num_top:
        return [[] for _ in logits_RV]
    best = torch.topk(logits_RV, num_top, dim=-1)
    log_probs = (best.values - norm_R[:, None]).tolist()
    return [list(zip(tokens, row, strict=True)) for tokens, row in zip(best.indices.tolist(), log_probs, strict=True)]


def _sample(logits_RV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return drawn tokens, int64 [R]."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits_RV.device)[:, None]

    vocab_size = logits_RV.shape[1]
    temperature_R1 = column([draw.sampling.temperature for draw in draws])
    top_k_R1 = column([draw.sampling.top_k or vocab_size for draw in draws])
    top_p_R1 = column([draw.sampling.top_p for draw in draws])
    ordered = logits_RV.sort(dim=-1, descending=True, stable=True)
    probs_RV = torch.softmax((ordered.values - ordered.values[:, :1]) / temperature_R1, dim=-1)
    probs_RV = probs_RV * (torch.arange(vocab_size, device=logits_RV.device) < top_k_R1)
    probs_RV = probs_RV / probs_RV.sum(dim=-1, keepdim=True)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    probs_RV = probs_RV * ((before_RV < top_p_R1) | (top_p_R1 >= 1))
    sums_RV = probs_RV.cumsum(dim=-1)
    goal_R1 = column([uniform(draw.sampling.seed, draw.position) for draw in draws]) * sums_RV[:, -1:]
    ranks_R1 = (sums_RV <= goal_R1).sum(dim=-1, keepdim=True).clamp_max((probs_RV > 0).sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    return ordered.indices.gather(1, ranks_R1)[:, 0]


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that seed and position decide.

    Source: Philox4x64-10 (Salmon et al., SC 2011), as numpy has it: the seed is the key, the position the counter.
    """
    generator = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position))
    return float(generator.random())
