"""How much an answer repeats itself: damage that a loss on fixed text never shows."""

import numpy as np

from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic, mean_statistic
from model_optimizer.metrics.words import example_answers, words

GRAM = 4


def repeated_ratio(text: str) -> float:
    """Return the share of a text's 4-grams of words that stood there before; 0 for fewer than two of them.

    Source: seq-rep-4 of Welleck et al., Neural text generation with unlikelihood training, arXiv 1908.04319, section 6.
    """
    found = words(text)
    grams = [found[start : start + GRAM] for start in range(len(found) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def repetition(answers: Answers) -> Statistic:
    """Return the repeated share of every output."""
    return mean_statistic(np.array([repeated_ratio(output) for output in answers.outputs_N]))


METRICS.register("repetition")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=False,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: repetition(answers).value,
        example=lambda seed: Answers(*example_answers(seed)),
        statistic=repetition,
        needs_reference=False,
    )
)
