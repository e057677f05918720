"""Warm-up: where a series of latencies becomes steady, what was cut off before, and whether it became steady at all.

Caches fill, clocks rise and queues build up while a run begins; percentiles over that part describe no server. The
cut part is kept and shown, never silently dropped. A series that never settles (drift, a step in the middle) is said
to be unsteady: no percentile of it means anything.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError, MeasurementUnstable

MAX_WINDOWS, MIN_WINDOWS, MIN_PER_WINDOW = 256, 32, 5
GROUP = 4
"""Windows averaged before the kept part is judged: wide enough to be nearly independent."""
HEAD_SIGMAS, DRIFT_SIGMAS = 3.5, 4.0
"""How far from chance a beginning or a drift must be; error rates: benchmarks/statistics_intervals.py."""
NOISE_BLOCKS = 8
"""The noise of means of up to so many windows is read off the second half; that of longer ones is scaled from it."""
NORMAL_MEDIAN_DIFFERENCE = 0.6745 * math.sqrt(2)
"""Median size of the difference of two independent standard normal values."""
TRIMMED_RATIO = 0.2
"""Left out of a window's mean on either side."""
SAFETY_RATIO = 0.5
"""What is cut beyond the best cut, as a part of it: the rest of an exponential falls to its power 1.5."""
TOLERANCE_RATIO = 0.05
"""What moves the level by less does not matter, however significant it is."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """What the detector says about N samples in time order."""

    num_samples: int
    num_discarded: int
    """Samples of the warm-up, from the start; 0 where there is none to see."""
    steady: bool
    reason: str
    levels_W: NDArray[np.float64]
    """Level of equal windows over the whole series, the discarded part included: for showing."""

    @property
    def discarded_ratio(self) -> float:
        return self.num_discarded / self.num_samples

    def kept(self, samples_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the steady part.

        Raises:
            MeasurementUnstable: there is none.
        """
        if not self.steady:
            raise MeasurementUnstable(f"no steady state: {self.reason}; measure longer or on a calmer machine")
        return samples_N[self.num_discarded :]


def find_steady_state(samples_N: NDArray[np.float64]) -> SteadyState:
    """Find the warm-up of a series of positive values in time order, and judge whether what follows is steady.

    Equal windows are reduced to trimmed means of the logarithm, so that half and twice the level lie equally far and a
    single stall moves little. There is a warm-up when the mean of the first 1, 2, 4 ... windows differs from the second
    half by 5 % and 3.5 sigma; then the cut with the least standard error of the rest (MSER) is taken and half as much
    again, which must leave more than half of the run. The kept part is steady when neither a straight line through it
    nor its three thirds move by more than 5 % and 4 sigma.

    Source: White, An effective truncation heuristic for bias reduction in simulation output, Simulation 69, 1997 (MSER).

    Raises:
        ConfigError: a value that is not positive and finite.
    """
    from scipy.stats import trim_mean

    if not ((samples_N > 0) & np.isfinite(samples_N)).all():
        raise ConfigError("a steady state is sought in positive finite values, e.g. latencies of requests that ended well")
    size = samples_N.size
    num_windows = min(MAX_WINDOWS, size // MIN_PER_WINDOW)
    if num_windows < MIN_WINDOWS:
        reason = f"{size} samples are too few to tell; {MIN_WINDOWS * MIN_PER_WINDOW} are the least"
        return SteadyState(size, 0, False, reason, np.array([]))
    length = size // num_windows
    windows_WL = samples_N[size - length * num_windows :].reshape(num_windows, length)
    levels_W = trim_mean(np.log(windows_WL), TRIMMED_RATIO, axis=1)
    best = _best_cut(levels_W) if _has_head(levels_W) else 0
    cut = math.ceil(best * (1 + SAFETY_RATIO))
    if cut >= num_windows // 2:
        fault, cut = f"after {best / num_windows:.0%} of the run it still looks like warm-up", 0
    else:
        fault = _unsteady(levels_W[cut:])
    discarded = size - length * (num_windows - cut) if cut else 0
    reason = fault or (f"the first {discarded} of {size} samples are warm-up" if cut else "no warm-up seen")
    return SteadyState(size, discarded, not fault, reason, np.exp(levels_W))


def _has_head(levels_W: NDArray[np.float64]) -> bool:
    """Ask whether the first 1, 2, 4 ... windows differ from the second half by more than its noise at that scale."""
    half = levels_W.size // 2
    reference, noise, num = levels_W[half:], 0.0, 1
    while num <= half:
        if num <= NOISE_BLOCKS:
            blocks = reference[: reference.size // num * num].reshape(-1, num).mean(axis=1)
            noise = float(blocks.std(ddof=1))
        else:
            noise /= math.sqrt(2)
        apart = abs(float(levels_W[:num].mean() - reference.mean()))
        if apart > max(math.log1p(TOLERANCE_RATIO), HEAD_SIGMAS * noise * math.sqrt(1 + num / half)):
            return True
        num *= 2
    return False


def _best_cut(levels_W: NDArray[np.float64]) -> int:
    """Return the k <= W / 2 with the least sum of squares of windows k ... around their mean, over (W - k)^2.

    Every window counts with a third of the tolerance as noise, or a run with hardly any would lose half of itself to a
    drift too small to matter.
    """
    left = levels_W.size - np.arange(levels_W.size)
    sums, squares = (np.cumsum((levels_W**power)[::-1])[::-1] for power in (1, 2))
    error = (squares - sums**2 / left + left * (math.log1p(TOLERANCE_RATIO) / 3) ** 2) / left**2
    return int(error[: levels_W.size // 2 + 1].argmin())


def _unsteady(levels_W: NDArray[np.float64]) -> str:
    """Return why the kept windows are not steady, or an empty string.

    The noise comes from differences of neighbours (their median size), which neither a drift nor a step can inflate.
    """
    size = levels_W.size // GROUP
    kept_G = levels_W[levels_W.size - size * GROUP :].reshape(size, GROUP).mean(axis=1)
    noise = float(np.median(np.abs(np.diff(kept_G)))) / NORMAL_MEDIAN_DIFFERENCE
    places = np.arange(size) - (size - 1) / 2
    drift = float(places @ kept_G / (places @ places)) * (size - 1)
    least = math.log1p(TOLERANCE_RATIO)
    if abs(drift) > max(least, DRIFT_SIGMAS * noise * (size - 1) / math.sqrt(places @ places)):
        return f"it drifts by {math.expm1(drift):+.1%} from the first kept sample to the last"
    thirds = [float(part.mean()) for part in np.array_split(kept_G, 3)]
    if max(thirds) - min(thirds) > max(least, DRIFT_SIGMAS * noise * math.sqrt(6 / size)):
        return f"its thirds disagree: {', '.join(f'{math.exp(third):.4g}' for third in thirds)}"
    return ""
