"""The family of metrics: what one is, and the kinds of observation that they read.

A metric of answers is more than a number: it is a function of how often each item counts, so that whole clusters of items can
be drawn again and again without scoring anything twice.

Shapes: T positions, V vocabulary, N items, C choices, B resamples.
"""

from collections.abc import Callable, Sequence
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


Embedder = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts -> one vector of unit length each, float32 [texts, width]."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What was answered to N items, beside what is right of each; spans, boxes and rankings are JSON."""

    outputs_N: tuple[str, ...]
    references_N: tuple[tuple[str, ...], ...]
    embed: Embedder | None = None
    """Only where a metric compares meanings."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """A score of N items as a function of their weights."""

    per_item_N: NDArray[np.float64]
    """Each item's own score; NaN where an item alone has none."""
    weighted: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    """Weights [B, N] -> scores [B]."""
    sums: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
    """Tops and bottoms per item, where the score is the ratio of their sums."""

    @property
    def value(self) -> float:
        """Return the score with every item counted once."""
        return float(self.weighted(np.ones((1, self.per_item_N.size)))[0])


def mean_statistic(values_N: NDArray[np.float64]) -> Statistic:
    """Return the weighted mean of the items' scores."""
    return ratio_statistic(values_N, np.ones_like(values_N))


def ratio_statistic(tops_N: NDArray[np.float64], bottoms_N: NDArray[np.float64], *, empty: float = 0.0) -> Statistic:
    """Return sum(w * top) / sum(w * bottom), and `empty` where the bottom is 0."""

    def weighted(weights_BN: NDArray[np.float64]) -> NDArray[np.float64]:
        bottoms_B = weights_BN @ bottoms_N
        return np.where(bottoms_B > 0, weights_BN @ tops_N / np.where(bottoms_B > 0, bottoms_B, 1.0), empty)

    own_N = np.divide(tops_N, bottoms_N, out=np.full(tops_N.size, np.nan), where=bottoms_N > 0)
    return Statistic(own_N, weighted, (tops_N, bottoms_N))


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
    statistic: Callable[[O], Statistic] | None = None
    """The score as a function of weights, where a golden set may be judged by this metric."""
    is_binary: bool = False
    """Whether every item is right or wrong, so that baseline and candidate differ by flips."""
    resampled: bool = True
    """Whether other items could have been drawn; False where a score belongs to these very ones, e.g. a catalogue's coverage."""
    needs_reference: bool = True
    reads_json: bool = False
    """Whether references and outputs are JSON instead of prose."""
    from_predictions: bool = False
    """Whether answers come from a file of predictions instead of a language model."""
    check: Callable[[tuple[str, ...]], None] = lambda _: None
    """Refuse references that cannot be read, with a ConfigError that says why."""


METRICS: Registry[Metric[Any]] = Registry("metric", "model_optimizer.metrics")


def example_logits(seed: int) -> LogitsPair:
    """Return random logits of two related models, [12, 31]."""
    generator = np.random.default_rng(seed)
    reference_TV = generator.normal(0, 3, (12, 31)).astype(np.float32)
    return LogitsPair(reference_TV, reference_TV + generator.normal(0, 0.3, (12, 31)).astype(np.float32))
