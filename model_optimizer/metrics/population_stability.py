"""Population stability index: how far the distribution of a figure moved, e.g. of scores, lengths or inputs between two weeks.

Bins come from both samples together, so that the index does not depend on which of them is called the reference; the first
and the last bin are open. What is not a number is counted apart and never binned.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import METRICS, Metric

FLOOR_RATIO = 1e-4
"""Least share of a bin: an empty one then counts for a finite amount."""
NUM_BINS = 10
MIN_SAMPLES = 200
"""Of each side. With 10 bins and no drift at all, the index is about 9 (1/n + 1/m): 0.09 at 200, below half of DRIFT."""
DRIFT = 0.2
"""Source: Siddiqi, Credit Risk Scorecards, 2006, chapter 9: above 0.25 a major shift, 0.1 to 0.25 some; 0.2 is customary."""


@dataclass(frozen=True, slots=True)
class SamplePair:
    """Two samples of one figure."""

    reference_N: NDArray[np.float64]
    current_M: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stability:
    """The index and what it rests on."""

    index: float | None
    """None: insufficient data."""
    drifted: bool
    num_reference: int
    """Finite or infinite values; NaN are apart."""
    num_current: int
    num_nan_reference: int
    num_nan_current: int
    edges: tuple[float, ...]
    """Inner borders; a value on one belongs to the bin above."""

    @property
    def insufficient(self) -> bool:
        return self.index is None


def stability_index(reference_B: NDArray[np.float64], current_B: NDArray[np.float64]) -> float:
    """Return sum((p - q) ln(p / q)) of two histograms over the same bins, shares p and q not below FLOOR_RATIO.

    Law: stability_index(a, b) == stability_index(b, a).

    Source: Kullback and Leibler 1951 (the symmetric divergence J).

    Raises:
        ConfigError: other bins on the two sides, or a side without any count.
    """
    if reference_B.shape != current_B.shape or reference_B.sum() <= 0 or current_B.sum() <= 0:
        raise ConfigError(f"the index needs counts over the same bins; seen: {reference_B.tolist()} and {current_B.tolist()}")
    p_B, q_B = (np.maximum(counts_B / counts_B.sum(), FLOOR_RATIO) for counts_B in (reference_B, current_B))
    return float(((p_B - q_B) * np.log(p_B / q_B)).sum())


def population_stability(pair: SamplePair, min_samples: int = MIN_SAMPLES) -> Stability:
    """Compare two samples; fewer than `min_samples` values on a side are insufficient data: no drift, and no all-clear."""
    reference_N, current_M = (sample[~np.isnan(sample)] for sample in (pair.reference_N, pair.current_M))
    nan = [int(np.isnan(sample).sum()) for sample in (pair.reference_N, pair.current_M)]
    if min(reference_N.size, current_M.size) < min_samples:
        return Stability(None, False, reference_N.size, current_M.size, nan[0], nan[1], ())
    edges = _edges(np.concatenate([reference_N, current_M]))
    counts = [
        np.bincount(np.searchsorted(edges, sample, side="right"), minlength=edges.size + 1) for sample in (reference_N, current_M)
    ]
    index = stability_index(counts[0].astype(np.float64), counts[1].astype(np.float64))
    return Stability(index, index >= DRIFT, reference_N.size, current_M.size, nan[0], nan[1], tuple(edges.tolist()))


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return inner borders: between all values where they are few, so that constants differ, else at quantiles."""
    distinct = np.unique(values)
    if distinct.size <= NUM_BINS:
        return distinct[1:]
    quantiles = np.quantile(values, np.arange(1, NUM_BINS) / NUM_BINS, method="higher")
    return np.unique(quantiles)


def _example(seed: int) -> SamplePair:
    generator = np.random.default_rng(seed)
    return SamplePair(generator.normal(0, 1, 400), generator.normal(0.3, 1.2, 300))


METRICS.register("population_stability")(
    Metric[SamplePair](
        unit="nats",
        higher_is_better=False,
        lower_bound=0.0,
        upper_bound=2 * math.log(1 / FLOOR_RATIO),
        compute=lambda pair: population_stability(pair, min_samples=1).index or 0.0,
        example=_example,
    )
)
