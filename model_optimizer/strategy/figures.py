"""From raw rows to figures: the measures of one candidate, and the points and options that flags and choice read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_optimizer.artifacts.front import Prediction
from model_optimizer.artifacts.measure import Dimension, Interval, Measure
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.measurement.paired import Ratio, bootstrap_mean, ratio_of_pairs
from model_optimizer.memory.budget import PROCESS_BYTES, RUNTIME_CONTEXT_BYTES
from model_optimizer.spec import Sla
from model_optimizer.strategy.damage import Damage
from model_optimizer.strategy.pareto import Limit, Objective, Point
from model_optimizer.strategy.race import Round

KL_RESOLUTION_NATS = 1e-4
"""KL below this is no difference in accuracy: float32 engines of one model differ by about as much in their rounding."""
SEED = 0
GIB = 2**30


@dataclass(frozen=True, slots=True)
class SpeedRows:
    """One candidate's share of all rounds."""

    tok_per_s: tuple[float, ...]
    """Decode throughput of each round."""
    latency_ms: tuple[float, ...]
    """Of every request of every round."""
    num_failed: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything measured of one candidate."""

    strategy: Strategy
    predicted: Prediction
    damage: Damage
    speed: SpeedRows
    engine_bytes: int
    kv_bytes: int
    """KV cache reserved for the stated concurrency."""

    @property
    def label(self) -> str:
        return self.strategy.label

    @property
    def throughput(self) -> float:
        """Return the median over rounds, tokens per second."""
        return float(np.median(self.speed.tok_per_s))

    @property
    def throughput_interval(self) -> Interval:
        """Return the bootstrap interval of the median over rounds."""
        ratio = ratio_of_pairs(self.speed.tok_per_s, [1.0] * len(self.speed.tok_per_s), seed=SEED)
        return ratio.interval

    @property
    def time_per_token_ms(self) -> float:
        return 1000 / self.throughput

    @property
    def kl_nats(self) -> float:
        """Return the mean over all tokens."""
        return float(np.mean(self.damage.weighted_kl_nats))

    @property
    def serving_bytes(self) -> int:
        """Return what a serving process would hold: weights, KV reservation, runtime context, interpreter."""
        return self.damage.weight_bytes + self.kv_bytes + RUNTIME_CONTEXT_BYTES + PROCESS_BYTES


def collect_rounds(rounds: Sequence[Round], label: str) -> SpeedRows:
    """Return what the rounds say of one candidate."""
    return SpeedRows(
        tok_per_s=tuple(row.decode_tok_per_s[label] for row in rounds),
        latency_ms=tuple(value for row in rounds for value in row.latency_ms[label]),
        num_failed=sum(row.num_failed[label] for row in rounds),
    )


def speed_ratio(figures: Figures, baseline: Figures) -> Ratio:
    """Return throughput over the baseline's, round by round."""
    return ratio_of_pairs(figures.speed.tok_per_s, baseline.speed.tok_per_s, seed=SEED)


def point(figures: Figures) -> Point:
    """Return what domination compares: machine time per token, resident weight bytes, KL."""
    interval = figures.throughput_interval
    time_interval = Interval(lower=1000 / interval.upper, upper=1000 / interval.lower)
    return Point(
        label=figures.label,
        objectives=(
            Objective("time_per_token_ms", figures.time_per_token_ms, time_interval),
            Objective("resident_bytes", figures.damage.weight_bytes),
            Objective("kl_nats", max(figures.kl_nats, KL_RESOLUTION_NATS)),
        ),
    )


def limits(sla: Sla, max_kl_nats: float) -> tuple[Limit, ...]:
    """Return the hard constraints that a profile states; what it leaves out does not constrain."""
    stated = (
        Limit("kl", "nats", at_most=max_kl_nats),
        Limit("serving_memory", "GiB", at_most=sla.memory_gib),
        Limit("generation_throughput", "tok/s", at_least=sla.throughput_tok_per_s),
        Limit("latency_p50", "ms", at_most=sla.p50_latency_ms),
        Limit("latency_p95", "ms", at_most=sla.p95_latency_ms),
        Limit("failed_requests", "", at_most=0),
    )
    return tuple(limit for limit in stated if limit.at_most is not None or limit.at_least is not None)


def constrained(figures: Figures) -> dict[str, float]:
    """Return the figures that `limits` constrain, by the same names."""
    latency = np.array(figures.speed.latency_ms or (np.inf,))
    return {
        "kl": figures.kl_nats,
        "serving_memory": figures.serving_bytes / GIB,
        "generation_throughput": figures.throughput,
        "latency_p50": float(np.quantile(latency, 0.5)),
        "latency_p95": float(np.quantile(latency, 0.95)),
        "failed_requests": figures.speed.num_failed,
    }


def measures(figures: Figures, baseline: Figures, sla: Sla, max_kl_nats: float) -> tuple[Measure, ...]:
    """Return `generation_throughput`, `time_per_token`, `faster_here`, `latency_p50`, `latency_p95`, `kl`, `flips`, `engine`,
    `resident`, `opened`.

    None gates here; verify judges the chosen engine. The latencies are absent where no request finished.
    """
    return (
        *_speed(figures, baseline, sla),
        *_latency(figures, baseline, sla),
        *_accuracy(figures, baseline, max_kl_nats),
        _bytes("engine", figures.engine_bytes, baseline.engine_bytes, "files of the engine"),
        _bytes(
            "resident",
            figures.damage.weight_bytes,
            baseline.damage.weight_bytes,
            "weights in memory, as the runtime says",
        ),
        _bytes("opened", figures.damage.growth_bytes, baseline.damage.growth_bytes, "growth of the process by opening it"),
    )


def _speed(figures: Figures, baseline: Figures, sla: Sla) -> tuple[Measure, ...]:
    rounds = len(figures.speed.tok_per_s)
    throughput = Measure(
        name="generation_throughput",
        dimension=Dimension.SPEED,
        unit="tok_per_s",
        value=figures.throughput,
        baseline=baseline.throughput,
        interval=figures.throughput_interval,
        limit=sla.throughput_tok_per_s,
        higher_is_better=True,
        num_samples=rounds,
        reason=f"tokens after a request's first, newcomers' prefill included; "
        f"median of {rounds} interleaved rounds at concurrency {sla.concurrency}",
    )
    time_per_token = Measure(
        name="time_per_token",
        dimension=Dimension.SPEED,
        unit="ms",
        value=figures.time_per_token_ms,
        baseline=baseline.time_per_token_ms,
        num_samples=rounds,
        reason="machine time, all streams together",
    )
    return throughput, time_per_token, _faster_here(figures, baseline, sla)


def _faster_here(figures: Figures, baseline: Figures, sla: Sla) -> Measure:
    """Return throughput over the baseline's; quantized candidates whose whole interval is below 1 are not chosen."""
    ratio = speed_ratio(figures, baseline)
    return Measure(
        name="faster_here",
        dimension=Dimension.SPEED,
        unit="ratio",
        value=ratio.value,
        baseline=1.0,
        interval=ratio.interval,
        limit=1.0,
        higher_is_better=True,
        num_samples=ratio.num_pairs,
        reason=f"throughput over that of {baseline.label}, interleaved at concurrency {sla.concurrency}",
    )


def _latency(figures: Figures, baseline: Figures, sla: Sla) -> tuple[Measure, ...]:
    if not figures.speed.latency_ms or not baseline.speed.latency_ms:
        return ()
    mine, base = constrained(figures), constrained(baseline)
    return tuple(
        Measure(
            name=name,
            dimension=Dimension.SPEED,
            unit="ms",
            value=mine[name],
            baseline=base[name],
            limit=limit,
            num_samples=len(figures.speed.latency_ms),
            reason="end to end; verify measures it with an interval",
        )
        for name, limit in (("latency_p50", sla.p50_latency_ms), ("latency_p95", sla.p95_latency_ms))
    )


def _accuracy(figures: Figures, baseline: Figures, max_kl_nats: float) -> tuple[Measure, ...]:
    text = f"against float32 torch on {len(figures.damage.kl_nats)} windows of held-out text"
    kl = Measure(
        name="kl",
        dimension=Dimension.ACCURACY,
        unit="nats",
        value=figures.kl_nats,
        baseline=baseline.kl_nats,
        interval=bootstrap_mean(figures.damage.weighted_kl_nats, seed=SEED)[1],
        limit=max_kl_nats,
        num_samples=figures.damage.num_tokens,
        reason=text,
    )
    flips = Measure(
        name="flips",
        dimension=Dimension.ACCURACY,
        unit="ratio",
        value=figures.damage.num_flips / figures.damage.num_tokens,
        baseline=baseline.damage.num_flips / baseline.damage.num_tokens,
        num_samples=figures.damage.num_tokens,
        reason=f"changed most likely token, {text}",
    )
    return kl, flips


def _bytes(name: str, value: int, baseline: int, reason: str) -> Measure:
    return Measure(name=name, dimension=Dimension.RESOURCE, unit="bytes", value=value, baseline=baseline, reason=reason)
