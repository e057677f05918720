"""Share of positions where the most likely next token changed: what greedy decoding would notice."""

import numpy as np
from numpy.typing import NDArray

from model_optimizer.metrics.kl_divergence import check_pair
from model_optimizer.metrics.registry import METRICS, LogitsPair, Metric, example_logits


def top1_flips(reference_TV: NDArray[np.float32], candidate_TV: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return at every position whether the argmax differs, bool [T]; ties go to the lower token id."""
    check_pair(reference_TV, candidate_TV)
    return np.asarray(reference_TV.argmax(axis=1) != candidate_TV.argmax(axis=1))


METRICS.register("top1_flips")(
    Metric[LogitsPair](
        unit="ratio",
        higher_is_better=False,
        lower_bound=0.0,
        upper_bound=1.0,
        compute=lambda pair: float(top1_flips(pair.reference_TV, pair.candidate_TV).mean()),
        example=example_logits,
    )
)
