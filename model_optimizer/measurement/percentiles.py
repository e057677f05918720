"""Quantiles with intervals that hold for latencies: no assumption on their distribution, and no bound where n is too small.

Independent samples take order statistics. Neighbours in time are seldom independent (they share a batch, a queue, the
machine's mood), so a series is tested first; if it is correlated, the interval rests on its effective sample size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Interval
from model_optimizer.errors import ConfigError, MeasurementUnstable

INDEPENDENCE_ALPHA = 0.05
NUM_LAGS = 20
"""Neighbours that the independence test looks at."""
MIN_BATCHES, MAX_BATCHES = 8, 32
BATCH_CORRELATION_TIMES = 15
"""Least length of a batch in correlation times: for an autoregression of 0.9 the batches' variance is then 3 % short."""
MIN_TAIL = 10
"""Effective samples beyond a quantile of a correlated series, below which its variance is not known well enough."""
NUM_RESAMPLES = 1000
RESAMPLE_CHUNK = 4_000_000
"""Values drawn at once by the block bootstrap: 32 MB."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """A sample quantile; a bound is None where the sample is too small to give it."""

    value: float
    lower: float | None
    upper: float | None
    level: float
    num_samples: int
    effective_samples: float | None = None
    """As many independent samples would say as much about this quantile; None where independence was not asked."""
    reason: str = ""
    """Why a bound is missing."""

    def interval(self) -> Interval | None:
        """Return the interval where both bounds are finite."""
        if self.lower is None or self.upper is None or not np.isfinite([self.lower, self.upper]).all():
            return None
        return Interval(lower=self.lower, upper=self.upper, level=self.level)

    def bounded(self) -> "Quantile":
        """Return the quantile itself.

        Raises:
            MeasurementUnstable: the sample bounds it on one side at most, so it may not be quoted.
        """
        if self.interval() is None:
            raise MeasurementUnstable(self.reason or f"{self.num_samples} samples do not bound this quantile; measure longer")
        return self


def quantile(samples: NDArray[np.float64], ratio: float, *, level: float = 0.95) -> Quantile:
    """Return the `ratio` quantile (0.5 = median) with a two-sided interval from the binomial law of ranks.

    The share of samples below the true quantile is Binomial(n, ratio), so the order statistics of rank
    l = ppf(tail) and u = ppf(1 - tail) + 1 enclose it with probability of at
    least `level`, whatever the law of the samples, provided that they are independent.

    Source: David and Nagaraja, Order Statistics, 3rd ed., section 7.1.

    Raises:
        ConfigError: no samples.
    """
    from scipy.stats import binom

    if samples.size == 0:
        raise ConfigError("a quantile needs at least one sample; seen: none")
    ordered, tail = np.sort(samples), (1 - level) / 2
    low, high = int(binom.ppf(tail, ordered.size, ratio)), int(binom.ppf(1 - tail, ordered.size, ratio)) + 1
    return Quantile(
        value=_value(ordered, ratio),
        lower=float(ordered[low - 1]) if low >= 1 else None,
        upper=float(ordered[high - 1]) if high <= ordered.size else None,
        level=level,
        num_samples=ordered.size,
        reason="" if low >= 1 and high <= ordered.size else _too_few(ordered.size, ratio, level),
    )


def samples_for_upper_bound(ratio: float, *, level: float = 0.95) -> int:
    """Return how many samples give the `ratio` quantile a finite one-sided upper bound: ratio^n <= 1 - level.

    P99 at 95 %: 299. P95: 59.
    """
    return int(np.ceil(np.log(1 - level) / np.log(ratio)))


@dataclass(frozen=True, slots=True)
class Series:
    """Samples in the order in which they were taken, and what one look at them says about their correlation."""

    samples: NDArray[np.float64]
    ordered: NDArray[np.float64]
    correlation_time: float
    """1 + 2 sum of the autocorrelations of the ranks; 1 when independent."""
    independent: bool

    @classmethod
    def of(cls, samples: NDArray[np.float64]) -> "Series":
        """Sort the samples once and test them for autocorrelation.

        Raises:
            ConfigError: no samples.
        """
        if samples.size == 0:
            raise ConfigError("a quantile needs at least one sample; seen: none")
        order = np.argsort(samples, kind="stable")
        ordered = samples[order]
        ranks = np.empty(samples.size)
        ranks[order] = np.searchsorted(ordered, ordered)  # equal values share a rank, or their order would look like correlation
        correlations = autocorrelations(ranks)
        return cls(samples, ordered, _correlation_time(correlations), _independent(correlations, samples.size))

    @property
    def effective_samples(self) -> float:
        """Return n over the correlation time: about how many independent samples say as much about the centre."""
        return self.ordered.size / (1.0 if self.independent else self.correlation_time)

    def quantile(self, ratio: float, *, level: float = 0.95) -> Quantile:
        """Return the `ratio` quantile with an interval that respects the order of the samples.

        Independent: order statistics. Correlated: the share of samples at or below the quantile is a mean over time;
        its variance comes from batch means, which makes n / inflation effective samples, discounted by (z / t)^2 for
        the few batches; the sample's quantiles at the levels of Beta(n_eff ratio, n_eff (1 - ratio)) are the bounds. In
        a tail the inflation is the mean of that at the quantile and that at twice the tail, which rests on more
        samples (coverage: benchmarks/statistics_intervals.py); where the greater of the two leaves too few, none is given.

        Source: Woodruff, Confidence intervals for medians and other position measures, JASA 47, 1952; Korn and
        Graubard, Confidence intervals for proportions with small expected number of positive counts, Survey
        Methodology 24, 1998; Law and Kelton, Simulation Modeling and Analysis, section 9.5 (batch means).
        """
        if self.independent:
            return _with_effective(quantile(self.ordered, ratio, level=level), float(self.ordered.size))
        return self._correlated(ratio, level)

    def _correlated(self, ratio: float, level: float) -> Quantile:
        from scipy.stats import beta, norm, t

        size, tail, value = self.ordered.size, (1 - level) / 2, _value(self.ordered, ratio)
        num_batches = int(min(MAX_BATCHES, size / (BATCH_CORRELATION_TIMES * self.correlation_time)))
        if num_batches < MIN_BATCHES:
            least = int(np.ceil(MIN_BATCHES * BATCH_CORRELATION_TIMES * self.correlation_time))
            reason = f"{size} samples, correlated over {self.correlation_time:.3g} of them, give no variance; {least} would"
            return Quantile(value, None, None, level, size, self.effective_samples, reason)
        at, near = self._inflation(value, num_batches), self._inflation(_value(self.ordered, _nearer(ratio)), num_batches)
        discount = float(norm.ppf(tail) / t.ppf(tail, num_batches - 1)) ** 2
        if (surely := discount * size / max(at, near)) * min(ratio, 1 - ratio) < MIN_TAIL:
            return Quantile(value, None, None, level, size, surely, _too_few(surely, ratio, level, correlated=True))
        effective = discount * size / ((at + near) / 2)
        levels = beta.ppf([tail, 1 - tail], effective * ratio, effective * (1 - ratio))
        lower, upper = np.quantile(self.ordered, levels, method="hazen" if np.isfinite(self.ordered[-1]) else "inverted_cdf")
        return Quantile(value, float(lower), float(upper), level, size, effective)

    def _inflation(self, value: float, num_batches: int) -> float:
        """Return by how much correlation inflates the variance of the share at or below `value`, at least 1."""
        length = self.samples.size // num_batches
        below = (self.samples[: length * num_batches] <= value).reshape(num_batches, length).mean(axis=1)
        independent = float(below.mean() * (1 - below.mean()))
        return max(1.0, length * float(below.var(ddof=1)) / independent) if independent > 0 else 1.0


def series_quantile(samples: NDArray[np.float64], ratio: float, *, level: float = 0.95) -> Quantile:
    """Return `Series.of(samples).quantile(ratio)`; for several quantiles make the series once."""
    return Series.of(samples).quantile(ratio, level=level)


def quantile_ratio(candidate: Quantile, baseline: Quantile) -> Interval | None:
    """Return an interval of candidate over baseline of the same quantile of two independent series; None without bounds.

    The bounds' distances from their values are combined on the log scale: lower = d - sqrt((a - l_a)^2 + (u_b - b)^2),
    upper = d + sqrt((u_a - a)^2 + (b - l_b)^2) with d = a - b.

    Source: Zou and Donner, Construction of confidence limits about effect measures, Statistics in Medicine 27, 2008 (MOVER).

    Raises:
        ConfigError: other levels on the two sides, or a bound that is not positive.
    """
    over, under = candidate.interval(), baseline.interval()
    if over is None or under is None:
        return None
    if over.level != under.level or min(over.lower, under.lower) <= 0:
        raise ConfigError(
            f"a ratio of quantiles needs positive bounds of one level; seen: {over.lower:g} and {under.lower:g} "
            f"at {over.level:g} and {under.level:g}"
        )
    top = np.log([over.lower, candidate.value, over.upper])
    bottom = np.log([under.lower, baseline.value, under.upper])
    lower = top[1] - bottom[1] - np.hypot(top[1] - top[0], bottom[2] - bottom[1])
    upper = top[1] - bottom[1] + np.hypot(top[2] - top[1], bottom[1] - bottom[0])
    return Interval(lower=float(np.exp(lower)), upper=float(np.exp(upper)), level=candidate.level)


def jitter(series: Series, *, seed: int, level: float = 0.95) -> Quantile:
    """Return P99 - P50 with a block-bootstrap interval; no bounds where P99 itself has none."""

    def spread(drawn_RN: NDArray[np.float64]) -> NDArray[np.float64]:
        median, high = np.quantile(drawn_RN, [0.5, 0.99], axis=1)
        return np.asarray(high - median, dtype=np.float64)

    high = series.quantile(0.99, level=level)
    value = high.value - _value(series.ordered, 0.5)
    if high.interval() is None:
        return Quantile(value, None, None, level, high.num_samples, high.effective_samples, high.reason)
    found = block_bootstrap(series, spread, seed=seed, level=level)
    return Quantile(value, found.lower, found.upper, level, high.num_samples, high.effective_samples)


def block_bootstrap(
    series: Series, statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]], *, seed: int, level: float = 0.95
) -> Interval:
    """Return a percentile interval of any statistic of a series, resampled in circular moving blocks.

    statistic: [R, N] resampled series -> [R] values. A block is 1 sample when the series is independent, else
    max(correlation time, (1.5 n tau^2)^(1/3)) rounded up, the order that minimises the error of the variance.

    Source: Kuensch, The jackknife and the bootstrap for general stationary observations, Annals of Statistics 17,
    1989; Politis and White, Automatic block-length selection, Econometric Reviews 23, 2004 (the n^(1/3) order).
    """
    size = series.samples.size
    length = block_length(series)
    num_blocks = -(-size // length)
    generator = np.random.default_rng(seed)
    values, chunk = list[NDArray[np.float64]](), max(1, RESAMPLE_CHUNK // size)
    for first in range(0, NUM_RESAMPLES, chunk):
        rows = min(chunk, NUM_RESAMPLES - first)
        starts = generator.integers(0, size, size=(rows, num_blocks, 1))
        places = ((starts + np.arange(length)) % size).reshape(rows, -1)[:, :size]
        values.append(statistic(series.samples[places]))
    lower, upper = np.quantile(np.concatenate(values), [(1 - level) / 2, (1 + level) / 2])
    return Interval(lower=float(lower), upper=float(upper), level=level)


def block_length(series: Series) -> int:
    """Return the length of the blocks that `block_bootstrap` draws, at most a quarter of the series."""
    if series.independent:
        return 1
    size, time = series.samples.size, series.correlation_time
    return int(max(1, min(size // 4, np.ceil(max(time, (1.5 * size * time**2) ** (1 / 3))))))


def autocorrelations(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the autocorrelations of lag 0, 1, ... n - 1 (1 at lag 0; all others 0 where the values do not vary)."""
    size = values.size
    spectrum = np.fft.rfft(values - values.mean(), 1 << (2 * size - 1).bit_length())
    products = np.fft.irfft(spectrum * spectrum.conj())[:size]
    flat = np.zeros(size)
    flat[0] = 1.0
    return np.asarray(products / products[0], dtype=np.float64) if products[0] > 1e-9 * size else flat


def _independent(correlations: NDArray[np.float64], size: int) -> bool:
    """Ask whether the first lags are as small as chance makes them.

    Q = n (n + 2) sum of r_k^2 / (n - k) is chi-squared of as many degrees as there are lags.

    Source: Ljung and Box, On a measure of lack of fit in time series models, Biometrika 65, 1978.
    """
    from scipy.stats import chi2

    num_lags = min(NUM_LAGS, size // 4)
    if num_lags < 1:
        return True
    lags = np.arange(1, num_lags + 1)
    statistic = size * (size + 2) * float((correlations[lags] ** 2 / (size - lags)).sum())
    return bool(chi2.sf(statistic, num_lags) > INDEPENDENCE_ALPHA)


def _correlation_time(correlations: NDArray[np.float64]) -> float:
    """Return 1 + 2 sum of r_k up to the first lag of at least five times that sum; at least 1.

    Source: Sokal, Monte Carlo methods in statistical mechanics, 1996, section 3 (the self-consistent window).
    """
    sums = 1 + 2 * np.cumsum(correlations[1:])
    wide = np.flatnonzero(np.arange(1, sums.size + 1) >= 5 * sums)
    return max(1.0, float(sums[wide[0]])) if wide.size else float(correlations.size)


def _value(ordered: NDArray[np.float64], ratio: float) -> float:
    """Interpolate between neighbours; where failures stand in as infinity, take the higher one."""
    return float(np.quantile(ordered, ratio, method="linear" if np.isfinite(ordered[-1]) else "higher"))


def _nearer(ratio: float) -> float:
    """Return the level with twice the tail of `ratio`, at most the median: 0.99 -> 0.98."""
    return max(0.5, 1 - 2 * (1 - ratio)) if ratio >= 0.5 else min(0.5, 2 * ratio)


def _with_effective(found: Quantile, effective: float) -> Quantile:
    return Quantile(found.value, found.lower, found.upper, found.level, found.num_samples, effective, found.reason)


def _too_few(seen: float, ratio: float, level: float, *, correlated: bool = False) -> str:
    far = max(ratio, 1 - ratio)
    needed = int(np.ceil(MIN_TAIL / (1 - far))) if correlated else samples_for_upper_bound(far, level=(1 + level) / 2)
    kind = "effective samples" if correlated else "samples"
    return f"{seen:.0f} {kind} do not bound the {ratio * 100:g} % quantile; {needed} would; measure longer"
