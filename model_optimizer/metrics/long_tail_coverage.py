"""Share of the long tail that a recommender shows to anybody at all."""

import numpy as np
from numpy.typing import NDArray

from model_optimizer.metrics.long_tail_exposure import example_recommendations, recommended
from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic


def long_tail_coverage(answers: Answers) -> Statistic:
    """Return the long-tail ids that are recommended at least once over all long-tail ids that the references name.

    It belongs to these very requests: fewer distinct requests show fewer items, so a resample says nothing about it.
    """
    tail = sorted({item for references in answers.references_N for item in references})
    column = {item: index for index, item in enumerate(tail)}
    shown_NI = np.zeros((len(answers.outputs_N), len(tail)), np.bool_)
    for row_I, output in zip(shown_NI, answers.outputs_N, strict=True):
        row_I[[column[item] for item in recommended(output) if item in column]] = True

    def weighted(weights_BN: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([shown_NI[row_N > 0].any(axis=0).sum() / max(1, len(tail)) for row_N in weights_BN], np.float64)

    return Statistic(np.full(len(answers.outputs_N), np.nan), weighted)


METRICS.register("long_tail_coverage")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda answers: long_tail_coverage(answers).value,
        example=example_recommendations,
        statistic=long_tail_coverage,
        reads_json=True,
        resampled=False,
        from_predictions=True,
    )
)
