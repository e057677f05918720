"""The family of metrics: what one is, and the three kinds of observation that they read.

Shapes: T positions, V vocabulary, N items, C choices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from model_optimizer.registry import Registry

O = TypeVar("O")  # noqa: E741


@dataclass(frozen=True, slots=True)
class LogitsPair:
    """Logits of two models at the same positions of the same text, float32 [T, V] each."""

    reference_TV: NDArray[np.float32]
    candidate_TV: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """log p of every scored token of a text, in nats, float32 [T]."""

    log_probs_T: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """log p of every choice of every item, in nats, and the right choice of each."""

    log_probs_NC: tuple[tuple[float, ...], ...]
    answers_N: tuple[int, ...]


@dataclass(frozen=True)  # no slots: `Metric[LogitsPair](...)` could not be built in Python 3.11
class Metric(Generic[O]):
    """One metric: how an observation becomes a number, and the law that the number obeys."""

    unit: str
    higher_is_better: bool
    lower_bound: float
    upper_bound: float
    compute: Callable[[O], float]
    example: Callable[[int], O]
    """A seeded observation, for the contract test."""


METRICS: Registry[Metric[Any]] = Registry("metric", "model_optimizer.metrics")


def example_logits(seed: int) -> LogitsPair:
    """Return random logits of two related models, [12, 31]."""
    generator = np.random.default_rng(seed)
    reference_TV = generator.normal(0, 3, (12, 31)).astype(np.float32)
    return LogitsPair(reference_TV, reference_TV + generator.normal(0, 0.3, (12, 31)).astype(np.float32))
