"""Share of items whose right choice is the most likely one.

The score of a choice is the sum of its tokens' log-probabilities, not their mean: the sum is the probability that the model
would write this choice, the mean favours long words that are certain once begun. Authors of a golden set keep the choices of an
item alike in length.
"""

import math

import numpy as np

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import METRICS, ChoiceScores, Metric, Statistic, mean_statistic


def best_choice(log_probs_C: tuple[float, ...]) -> int:
    """Return the index of the most likely choice; a tie goes to the lower index, and NaN never wins."""
    return int(np.argmax(np.nan_to_num(np.asarray(log_probs_C, dtype=np.float64), nan=-np.inf)))


def is_right(log_probs_C: tuple[float, ...], answer: int) -> bool:
    """Return whether the answer is the best choice; an answer without a finite score is wrong."""
    return math.isfinite(log_probs_C[answer]) and best_choice(log_probs_C) == answer


def choice_accuracy(scores: ChoiceScores) -> float:
    """Return the share of items answered right.

    Raises:
        ConfigError: no items.
    """
    if not scores.answers_N:
        raise ConfigError("accuracy needs at least one item; seen: none")
    return choices_right(scores).value


def choices_right(scores: ChoiceScores) -> Statistic:
    """Return 1 for every item answered right, else 0."""
    right = [is_right(row, answer) for row, answer in zip(scores.log_probs_NC, scores.answers_N, strict=True)]
    return mean_statistic(np.array(right, dtype=np.float64))


def _example(seed: int) -> ChoiceScores:
    generator = np.random.default_rng(seed)
    rows = tuple(tuple(float(value) for value in generator.normal(-4, 2, 4)) for _ in range(20))
    return ChoiceScores(rows, tuple(int(answer) for answer in generator.integers(0, 4, 20)))


METRICS.register("choice_accuracy")(
    Metric[ChoiceScores](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=choice_accuracy,
        example=_example,
        statistic=choices_right,
        is_binary=True,
    )
)
