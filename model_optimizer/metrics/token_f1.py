"""Overlap of words between a short answer and its best reference: the F1 of question answering."""

from collections import Counter

import numpy as np

from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic, mean_statistic
from model_optimizer.metrics.words import answer_words, example_answers


def token_f1(answers: Answers) -> Statistic:
    """Return the F1 of every output against the reference that fits best.

    Source: Rajpurkar et al., SQuAD, 2016, section 6.1: precision and recall of the bag of words.
    """
    return mean_statistic(
        np.array(
            [
                max(word_f1(answer_words(output), answer_words(reference)) for reference in references)
                for output, references in zip(answers.outputs_N, answers.references_N, strict=True)
            ]
        )
    )


def word_f1(output: tuple[str, ...], reference: tuple[str, ...]) -> float:
    """Return 2 common / (words + words) of two bags; two empty ones agree."""
    if not output or not reference:
        return float(output == reference)
    common = sum((Counter(output) & Counter(reference)).values())
    return 2 * common / (len(output) + len(reference))


METRICS.register("token_f1")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: token_f1(answers).value,
        example=lambda seed: Answers(*example_answers(seed)),
        statistic=token_f1,
    )
)
