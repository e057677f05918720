"""KL(p || q) of the next-token distributions: how far the candidate's predictions moved from the reference's."""

import math

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import METRICS, LogitsPair, Metric, example_logits

CHUNK_VALUES = 1 << 21
"""Logits per chunk: 16 MiB of float64."""


def kl_divergence_nats(reference_TV: NDArray[np.float32], candidate_TV: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return KL(p || q) = sum_v p_v (log p_v - log q_v) at every position, float64 [T], p the reference's softmax.

    Rows are shifted by their maximum and worked in float64, a chunk at a time; rounding below zero is cut off.

    Source: Kullback and Leibler, On Information and Sufficiency, 1951.

    Raises:
        ConfigError: the shapes differ, or are not [T, V] with T, V >= 1.
    """
    check_pair(reference_TV, candidate_TV)
    rows = max(1, CHUNK_VALUES // reference_TV.shape[1])
    parts = []
    for start in range(0, reference_TV.shape[0], rows):
        log_p, log_q = log_softmax(reference_TV[start : start + rows]), log_softmax(candidate_TV[start : start + rows])
        p = np.exp(log_p)
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)
        parts.append(np.maximum(0.0, terms.sum(axis=1)))
    return np.concatenate(parts)


def mean_kl_nats(reference_TV: NDArray[np.float32], candidate_TV: NDArray[np.float32]) -> float:
    """Return the mean of `kl_divergence_nats` over the positions."""
    return float(kl_divergence_nats(reference_TV, candidate_TV).mean())


def log_softmax(logits_TV: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return log softmax of every row, float64 [T, V]."""
    shifted = logits_TV.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), dtype=np.float64)


def check_pair(reference_TV: NDArray[np.float32], candidate_TV: NDArray[np.float32]) -> None:
    """Refuse logits that cannot be compared."""
    if reference_TV.shape != candidate_TV.shape or reference_TV.ndim != 2 or 0 in reference_TV.shape:
        raise ConfigError(
            f"logits of two models must share one shape [T, V]; seen: {reference_TV.shape} and {candidate_TV.shape}"
        )


METRICS.register("kl_divergence")(
    Metric[LogitsPair](
        unit="nats",
        higher_is_better=False,
        lower_bound=0.0,
        upper_bound=math.inf,
        compute=lambda pair: mean_kl_nats(pair.reference_TV, pair.candidate_TV),
        example=example_logits,
    )
)
