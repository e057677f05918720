"""Share of a recommender's slots that rare items get: exposure bias shows when it falls."""

import json

import numpy as np
from pydantic import TypeAdapter

from model_optimizer.metrics.json_answers import read_output
from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic, ratio_statistic

IDS: TypeAdapter[list[str | int]] = TypeAdapter(list[str | int])


def recommended(output: str) -> list[str]:
    """Return the item ids of one list of recommendations, a JSON list, as text."""
    return [str(found) for found in read_output(output, IDS)]


def long_tail_exposure(answers: Answers) -> Statistic:
    """Return the slots given to long-tail items over all slots; an item's references are the ids of the long tail."""
    shown = [recommended(output) for output in answers.outputs_N]
    rare = [sum(item in tail for item in items) for items, tail in zip(shown, map(frozenset, answers.references_N), strict=True)]
    return ratio_statistic(np.array(rare, np.float64), np.array([len(items) for items in shown], np.float64))


def example_recommendations(seed: int) -> Answers:
    """Return seeded lists of ten of sixty items, the last forty of which are the long tail."""
    generator = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, 61)
    odds = popularity / popularity.sum()
    outputs = [json.dumps([f"i{item}" for item in generator.choice(60, 10, replace=False, p=odds)]) for _ in range(25)]
    return Answers(tuple(outputs), (tuple(f"i{item}" for item in range(20, 60)),) * 25)


METRICS.register("long_tail_exposure")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: long_tail_exposure(answers).value,
        example=example_recommendations,
        statistic=long_tail_exposure,
        reads_json=True,
        from_predictions=True,
    )
)
