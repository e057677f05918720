"""Share of the facts that an answer had to hold and does hold."""

import numpy as np

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic, ratio_statistic
from model_optimizer.metrics.words import example_answers, words


def holds(output: tuple[str, ...], fact: str) -> bool:
    """Return whether one of a fact's wordings (`Paris | City of Light`) stands in the output, as whole words in its order."""
    return any(
        wanted and any(output[start : start + len(wanted)] == wanted for start in range(len(output) - len(wanted) + 1))
        for wanted in map(words, fact.split("|"))
    )


def key_fact_recall(answers: Answers) -> Statistic:
    """Return facts found over facts asked for; here every reference of an item is a fact, and all of them are wanted."""
    found = [
        sum(holds(words(output), fact) for fact in facts)
        for output, facts in zip(answers.outputs_N, answers.references_N, strict=True)
    ]
    asked = [len(facts) for facts in answers.references_N]
    return ratio_statistic(np.array(found, np.float64), np.array(asked, np.float64))


def _check(references: tuple[str, ...]) -> None:
    for fact in references:
        if not all(map(words, fact.split("|"))):
            raise ConfigError(f"fact {fact[:60]!r} has a wording without letters or digits; wordings are parted by `|`")


METRICS.register("key_fact_recall")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: key_fact_recall(answers).value,
        example=lambda seed: Answers(*example_answers(seed)),
        statistic=key_fact_recall,
        check=_check,
    )
)
