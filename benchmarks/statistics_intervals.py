"""Do the latency intervals hold, and does the steady-state detector err? On streams whose truth is known.

Coverage: 1,000 streams of 20,000 latencies per correlation, log-latency an AR(1) of unit variance (phi 0 to 0.9), and
waiting plus service times of an M/M/1 queue, whose law is exponential (Kendall); 95 % intervals of P50, P95 and P99.
Detector: streams of 20,000 with and without a warm-up, and streams that never settle. It is wrong when
- without a warm-up it discards more than 10 % of the stream, or calls it unsteady;
- with one, what it keeps of it moves P50, P95 or P99 by more than half the width of the 95 % interval (too early), or
  it discards more than twice the ramp (to its last 1 %) plus 10 % of the stream (too late), or it calls it unsteady;
- of a stream that drifts by half of its level, or steps up by half of it at 70 %, it calls any part steady.
"""

import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence import Figure, append
from model_optimizer.measurement.percentiles import Series
from model_optimizer.measurement.steady import SteadyState, find_steady_state

SEED = 20261130
NUM_STREAMS, LENGTH = 1000, 20_000
PHIS = (0.0, 0.3, 0.6, 0.9)
LOG_SIGMA = 0.3
"""Spread of log-latency: P99 is twice the median, as latencies of a loaded server are."""
QUEUE_LOAD, QUEUE_LENGTH, NUM_QUEUES = 0.5, 100_000, 400
RATIOS = (0.5, 0.95, 0.99)
AMPLITUDES = (-0.5, 1.0, 4.0)
"""Excess over the steady level at the start: half as slow (an empty queue), twice and five times as slow (cold caches)."""


Stream = NDArray[np.float64]
Wrong = Callable[[SteadyState], bool]


def streams(phi: float, num: int, generator: np.random.Generator) -> Iterator[Stream]:
    """Yield stationary AR(1) log-normal latencies with a median of 1."""
    from scipy.signal import lfilter

    for _ in range(num):
        noise = generator.standard_normal(LENGTH)
        noise[1:] *= np.sqrt(1 - phi**2)
        yield np.exp(LOG_SIGMA * lfilter([1.0], [1.0, -phi], noise))


def queues(num: int, generator: np.random.Generator) -> Iterator[Stream]:
    """Yield times in system of an M/M/1 queue of unit service rate, begun in its stationary state (Lindley)."""
    for _ in range(num):
        service = generator.exponential(1.0, QUEUE_LENGTH)
        between = generator.exponential(1 / QUEUE_LOAD, QUEUE_LENGTH)
        first = generator.exponential(1 / (1 - QUEUE_LOAD)) if generator.random() < QUEUE_LOAD else 0.0
        walk = np.concatenate([[first], first + np.cumsum(service[:-1] - between[1:])])
        waiting = walk - np.minimum(0.0, np.minimum.accumulate(walk))
        yield waiting + service


def coverage(case: str, found: Iterator[Stream], truths: tuple[float, ...]) -> list[tuple[str, str, int, int]]:
    """Return (case, quantile, intervals that hold the truth, intervals given)."""
    held = {ratio: [0, 0] for ratio in RATIOS}
    for stream in found:
        series = Series.of(stream)
        for ratio, truth in zip(RATIOS, truths, strict=True):
            if interval := series.quantile(ratio).interval():
                held[ratio][0] += interval.lower <= truth <= interval.upper
                held[ratio][1] += 1
    return [(case, f"p{ratio * 100:g}", hits, given) for ratio, (hits, given) in held.items()]


def share(case: str, metric: str, count: int, total: int, reason: str = "") -> Figure:
    """Return a share of trials with its Wilson interval."""
    from scipy.stats import binomtest

    bounds = binomtest(count, total).proportion_ci(method="wilson")
    return Figure(case, metric, count / total, "ratio", bounds.low, bounds.high, total, reason)


def coverage_figures(generator: np.random.Generator) -> list[Figure]:
    """Measure both kinds of stream; the pooled figure takes 250 streams of each correlation."""
    from scipy.stats import expon, norm

    rows = list[tuple[str, str, int, int]]()
    log_truths = tuple(float(np.exp(LOG_SIGMA * norm.ppf(ratio))) for ratio in RATIOS)
    mixed = dict.fromkeys((f"p{ratio * 100:g}" for ratio in RATIOS), (0, 0))
    for phi in PHIS:
        for part, num in (("mixed", NUM_STREAMS // len(PHIS)), ("rest", NUM_STREAMS - NUM_STREAMS // len(PHIS))):
            found = coverage(f"ar1_phi_{phi:g}", streams(phi, num, generator), log_truths)
            rows += found
            if part == "mixed":
                mixed = {name: (mixed[name][0] + hits, mixed[name][1] + given) for _, name, hits, given in found}
    truths = tuple(float(expon.ppf(ratio, scale=1 / (1 - QUEUE_LOAD))) for ratio in RATIOS)
    rows += coverage(f"mm1_load_{QUEUE_LOAD:g}", queues(NUM_QUEUES, generator), truths)
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for case, name, hits, given in rows:
        before = totals.get((case, name), (0, 0))
        totals[case, name] = (before[0] + hits, before[1] + given)
    figures = [share(case, f"{name}_coverage_ratio", hits, given) for (case, name), (hits, given) in totals.items()]
    figures += [share("1000_streams_mixed", f"{name}_coverage_ratio", *counts) for name, counts in mixed.items()]
    both = [sum(column) for column in zip(*mixed.values(), strict=True)]
    return [*figures, share("1000_streams_mixed", "coverage_ratio", both[0], both[1])]


def plain(stream: Stream, generator: np.random.Generator) -> tuple[Stream, Wrong]:
    """Return a stream without warm-up and what counts as wrong."""
    return stream, lambda found: not found.steady or found.discarded_ratio > 0.1


def ramped(stream: Stream, generator: np.random.Generator) -> tuple[Stream, Wrong]:
    """Return a stream with an exponential, linear or sudden warm-up over 1 to 20 % of it, and what counts as wrong."""
    length = int(LENGTH * generator.uniform(0.01, 0.2))
    place, amplitude = np.arange(LENGTH), float(generator.choice(AMPLITUDES))
    kind = generator.integers(0, 3)
    shapes = (np.exp(-np.log(100) * place / length), np.maximum(0.0, 1 - place / length), (place < length).astype(float))
    shaped = stream * (1 + amplitude * shapes[kind])

    def wrong(found: SteadyState) -> bool:
        cut = found.num_discarded
        if not found.steady or cut > 2 * length + 0.1 * LENGTH:
            return True
        clean = Series.of(stream[cut:])
        moved = Series.of(shaped[cut:])
        quantiles = [clean.quantile(ratio) for ratio in RATIOS]
        widths = [interval.upper - interval.lower for quantile in quantiles if (interval := quantile.interval())]
        shifts = [abs(moved.quantile(ratio).value - quantile.value) for ratio, quantile in zip(RATIOS, quantiles, strict=True)]
        return any(shift > width / 2 for shift, width in zip(shifts, widths, strict=True))

    return shaped, wrong


def unsettled(stream: Stream, generator: np.random.Generator) -> tuple[Stream, Wrong]:
    """Return a stream that drifts by half, up or down, or steps up by half late, and what counts as wrong."""
    place = np.linspace(0, 1, LENGTH)
    factors = (1 + 0.5 * place, 1.5 - 0.5 * place, 1 + 0.5 * (place > 0.7))
    return stream * factors[generator.integers(0, 3)], lambda found: found.steady


def detector_figures(generator: np.random.Generator) -> list[Figure]:
    """Count wrong answers over all correlations."""
    figures, total, uncut = list[Figure](), [0, 0], 0
    for case, make in (("no_warm_up", plain), ("warm_up", ramped), ("never_steady", unsettled)):
        wrong = 0
        for phi in PHIS:
            bad = 0
            for stream in streams(phi, NUM_STREAMS // len(PHIS), generator):
                shaped, is_wrong = make(stream, generator)
                bad += is_wrong(find_steady_state(shaped))
                uncut += case == "warm_up" and is_wrong(SteadyState(LENGTH, 0, True, "", shaped[:0]))
            print(case, phi, bad, file=sys.stderr)
            wrong += bad
        figures.append(share(case, "detector_wrong_ratio", wrong, NUM_STREAMS))
        total = [total[0] + wrong, total[1] + NUM_STREAMS]
    figures.append(share("warm_up", "control_nothing_cut_wrong_ratio", uncut, NUM_STREAMS))
    return [*figures, share("all_streams", "detector_wrong_ratio", total[0], total[1])]


def main() -> None:
    begun = time.perf_counter()
    generator = np.random.default_rng(SEED)
    figures = [*detector_figures(generator), *coverage_figures(generator)]
    figures.append(Figure("all", "wall_s", time.perf_counter() - begun, "s"))
    append(__file__, figures, ("numpy", "scipy"))


if __name__ == "__main__":
    main()
