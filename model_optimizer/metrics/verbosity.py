"""How much longer an answer is than it needs to be: a chatty model costs tokens and time."""

import numpy as np

from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic, mean_statistic
from model_optimizer.metrics.words import example_answers, words


def excess_ratio(output: str, references: tuple[str, ...]) -> float:
    """Return the share of the output's words that lie beyond the length of its longest reference, 0 where it is no longer."""
    written, needed = len(words(output)), max(len(words(reference)) for reference in references)
    return max(0.0, 1 - needed / written) if written else 0.0


def verbosity(answers: Answers) -> Statistic:
    """Return the excess share of every output."""
    pairs = zip(answers.outputs_N, answers.references_N, strict=True)
    return mean_statistic(np.array([excess_ratio(output, references) for output, references in pairs]))


METRICS.register("verbosity")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=False,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: verbosity(answers).value,
        example=lambda seed: Answers(*example_answers(seed)),
        statistic=verbosity,
    )
)
