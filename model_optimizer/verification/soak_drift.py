"""Did a distribution move? The population stability index of two samples, which never divides by nothing.

PSI = sum over bins of (c - r) ln(c / r), r and c the shares of reference and current, none below `FLOOR`. The bins lie between
quantiles of both samples together and are open at both ends, so swapping the samples changes nothing, a value outside the
reference's range has a bin, and two constants are two bins or one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from model_optimizer.errors import ConfigError

FLOOR = 1e-4
"""Least share of a bin; one that is empty on one side then adds at most 9.2 times the other's share."""
NUM_BINS = 10
MIN_SAMPLES = 100
"""Finite values of either sample; fewer say nothing about ten bins."""
MOVED = 0.2
"""From here on a shift is called one. Source: Siddiqi, Credit Risk Scorecards, Wiley 2006 (0.1 slight, 0.25 strong)."""
CHANCE_LEVEL = 0.999


class Shift(StrEnum):
    """What a comparison says."""

    STABLE = "stable"
    MOVED = "moved"
    INSUFFICIENT = "insufficient data"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two samples side by side."""

    psi: float | None
    """None where there is too little data."""
    shift: Shift
    num_reference: int
    num_current: int
    num_nan_reference: int
    """Values that are not finite are counted, never binned."""
    num_nan_current: int


def stability_index(reference_counts: Sequence[int], current_counts: Sequence[int], *, floor: float = FLOOR) -> float:
    """Return the PSI of two histograms over the same bins; symmetric, finite, 0 for equal shares.

    Raises:
        ConfigError: different numbers of bins, or a histogram without any count.
    """
    reference, current = np.asarray(reference_counts, np.float64), np.asarray(current_counts, np.float64)
    if reference.shape != current.shape or not reference.sum() or not current.sum():
        raise ConfigError(f"two histograms of the same bins with counts are compared; seen: {reference_counts}, {current_counts}")
    r, c = (np.maximum(counts / counts.sum(), floor) for counts in (reference, current))
    return float(((c - r) * np.log(c / r)).sum())


def compare(reference: Sequence[float], current: Sequence[float]) -> Comparison:
    """Compare two samples; `MOVED` only beyond what chance does with so few values.

    Under no shift PSI is about (1 / n + 1 / m) chi-squared with one degree of freedom less than bins.
    Source: Yurdakul and Naranjo, Statistical properties of the population stability index, J. Risk Model Validation 14, 2020.
    """
    from scipy.stats import chi2

    old, new = np.asarray(reference, np.float64), np.asarray(current, np.float64)
    finite_old, finite_new = old[np.isfinite(old)], new[np.isfinite(new)]
    n, m = finite_old.size, finite_new.size
    lost = (old.size - n, new.size - m)
    if min(n, m) < MIN_SAMPLES:
        return Comparison(None, Shift.INSUFFICIENT, n, m, *lost)
    pooled = np.concatenate([np.quantile(side, np.arange(1, NUM_BINS) / NUM_BINS) for side in (finite_old, finite_new)])
    edges = np.unique(pooled)
    if edges.size > NUM_BINS:
        edges = np.unique(np.quantile(edges, np.arange(NUM_BINS) / (NUM_BINS - 1)))
    counts = [
        np.bincount(np.searchsorted(edges, side, side="left"), minlength=edges.size + 1) for side in (finite_old, finite_new)
    ]
    psi = stability_index(counts[0].tolist(), counts[1].tolist())
    chance = float(chi2.ppf(CHANCE_LEVEL, max(1, edges.size))) * (1 / n + 1 / m)
    return Comparison(psi, Shift.MOVED if psi > max(MOVED, chance) else Shift.STABLE, n, m, *lost)
