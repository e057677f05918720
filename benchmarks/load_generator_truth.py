"""What a scripted server's latencies are by arithmetic: from schedule and script alone, without looking at a clock."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model_optimizer.measurement.scripted_server import Stall

RATIOS = (0.5, 0.9, 0.95, 0.99, 0.999)


def true_latency_s(due_s: NDArray[np.float64], delay_s: NDArray[np.float64], stalls: Sequence[Stall]) -> NDArray[np.float64]:
    """Return the latency of every request [N] of an open loop, from the moment at which it was due.

    A server that stands still neither reads nor sends: a request that comes meanwhile is read at the end of the stall, an
    answer that would leave meanwhile leaves then. Times count from the first request.
    """
    arrived, ends = due_s.copy(), [(stall.at_s, stall.at_s + stall.length_s) for stall in sorted(stalls, key=lambda it: it.at_s)]
    for begin, end in ends:
        arrived = np.where((arrived >= begin) & (arrived < end), end, arrived)
    left = arrived + delay_s
    for begin, end in ends:
        left = np.where((left >= begin) & (left < end), end, left)
    return left - due_s


def relative_errors(measured: NDArray[np.float64], truth: NDArray[np.float64]) -> dict[float, float]:
    """Return |measured / true - 1| of each percentile."""
    return {ratio: abs(float(np.quantile(measured, ratio)) / float(np.quantile(truth, ratio)) - 1) for ratio in RATIOS}
