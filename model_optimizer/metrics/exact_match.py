"""Share of short answers that equal a reference once case, punctuation and articles are put aside."""

import numpy as np

from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic, mean_statistic
from model_optimizer.metrics.words import answer_words, example_answers


def exact_match(answers: Answers) -> Statistic:
    """Return 1 for every output whose words are those of one of its references, else 0."""
    return mean_statistic(
        np.array(
            [
                float(answer_words(output) in {answer_words(reference) for reference in references})
                for output, references in zip(answers.outputs_N, answers.references_N, strict=True)
            ]
        )
    )


METRICS.register("exact_match")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: exact_match(answers).value,
        example=lambda seed: Answers(*example_answers(seed)),
        statistic=exact_match,
        is_binary=True,
    )
)
