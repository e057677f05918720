"""Latency and throughput at the profile's concurrency: chosen engine and baseline in interleaved blocks.

Both see the same requests in the same rounds. The first block of each is warm-up: kept among the raw samples,
left out of every figure.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.measure import Interval, Verdict
from model_optimizer.artifacts.verification import LatencyResult
from model_optimizer.measurement.interleave import interleave
from model_optimizer.measurement.load import LoadRecord, join, run_closed_loop
from model_optimizer.measurement.paired import Ratio, ratio_of_pairs
from model_optimizer.measurement.percentiles import quantile, samples_for_upper_bound
from model_optimizer.protocols import GenerationRequest, Progress, Runtime
from model_optimizer.spec import Sla, Traffic
from model_optimizer.traffic.lengths import build_requests, sample_requests
from model_optimizer.verification.config import VerifyConfig
from model_optimizer.verification.held_out import Engines
from model_optimizer.verification.statistics import normal_quantile

MIN_ROUNDS, MAX_ROUNDS = 5, 10
CANDIDATE, BASELINE = "candidate", "baseline"


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """The rounds of requests; every round is run by both engines."""

    warm_up: tuple[GenerationRequest, ...]
    rounds: tuple[tuple[GenerationRequest, ...], ...]
    concurrency: int
    seed: int

    @property
    def num_requests(self) -> int:
        return sum(len(block) for block in self.rounds)


@dataclass(frozen=True, slots=True)
class LatencyRun:
    """What the rounds saw, by engine."""

    warm_up: dict[str, LoadRecord]
    rounds: dict[str, tuple[LoadRecord, ...]]
    seed: int

    def joined(self, engine: str) -> LoadRecord:
        return join(self.rounds[engine])

    def throughput_tok_per_s(self, engine: str) -> list[float]:
        """Return output tokens per second of every round."""
        return [record.output_tok_per_s() for record in self.rounds[engine]]

    def speed_ratio(self) -> Ratio | None:
        """Return candidate over baseline throughput; None where a round of either produced nothing."""
        top, bottom = self.throughput_tok_per_s(CANDIDATE), self.throughput_tok_per_s(BASELINE)
        return ratio_of_pairs(top, bottom, seed=self.seed) if min(*top, *bottom) > 0 else None


def plan_latency(config: VerifyConfig, sla: Sla, traffic: Traffic, text_tokens: Sequence[int]) -> LatencyPlan:
    """Draw the requests: `latency_requests`, or more where a P95 limit or two per stream and round need them."""
    needed = config.latency_requests
    if sla.p95_latency_ms is not None or sla.ttft_p95_ms is not None:
        needed = max(needed, samples_for_upper_bound(0.95, level=1 - config.alpha))
    num_rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, needed // (2 * sla.concurrency)))
    block = max(2 * sla.concurrency, math.ceil(needed / num_rounds))
    shapes = sample_requests(traffic, sla.max_model_len, num_rounds * block, config.seed)
    requests = build_requests(shapes, text_tokens, config.seed)
    rounds = tuple(requests[start : start + block] for start in range(0, len(requests), block))
    return LatencyPlan(rounds[0][: sla.concurrency], rounds, sla.concurrency, config.seed)


def run_latency(engines: Engines, plan: LatencyPlan, progress: Progress) -> LatencyRun:
    """Warm both engines up, then run every round on both, the order turned round each time."""
    runtimes: dict[str, Runtime] = {CANDIDATE: engines.candidate, BASELINE: engines.baseline}
    warm_up = {name: run_closed_loop(runtime, plan.warm_up, plan.concurrency) for name, runtime in runtimes.items()}
    arms = {name: _arm(runtime, plan) for name, runtime in runtimes.items()}
    rounds = interleave(arms, len(plan.rounds), progress=progress, label="latency blocks")
    return LatencyRun(warm_up, rounds, plan.seed)


def _arm(runtime: Runtime, plan: LatencyPlan) -> Callable[[int], LoadRecord]:
    return lambda number: run_closed_loop(runtime, plan.rounds[number], plan.concurrency)


def summarise(run: LatencyRun, engine: str, label: str) -> LatencyResult:
    """Return the figures of one engine; a percentile's interval is absent where the sample is too small for a bound."""
    record = run.joined(engine)
    columns = {"": record.end_to_end_ms(), "ttft_": record.ttft_ms(), "itl_": record.itl_ms()}
    percentiles, intervals = dict[str, float](), dict[str, Interval]()
    for prefix, samples_ms in columns.items():
        for name in ("p50", "p95", "p99") if not prefix else ("p50", "p95"):
            if samples_ms.size == 0:
                continue
            found = quantile(samples_ms, int(name[1:]) / 100)
            percentiles[f"{prefix}{name}"] = found.value
            if prefix != "itl_" and (interval := found.interval()):  # gaps of one request are not independent
                intervals[f"{prefix}{name}"] = interval
    return LatencyResult(
        strategy=label,
        concurrency=record.concurrency,
        num_requests=record.num_requests,
        num_failed=record.num_failed,
        throughput_tok_per_s=float(np.mean(run.throughput_tok_per_s(engine))),
        percentiles_ms=percentiles,
        intervals_ms=intervals,
    )


@dataclass(frozen=True, slots=True)
class LimitCheck:
    """A percentile against its limit."""

    verdict: Verdict
    samples_needed: int
    reason: str


def check_limit(samples_ms: NDArray[np.float64], ratio: float, limit_ms: float, *, alpha: float) -> LimitCheck:
    """Judge whether the `ratio` quantile stays below the limit: its one-sided bounds must lie on one side of it."""
    if samples_ms.size == 0:
        return LimitCheck(Verdict.REJECT, 0, "no request finished")
    found = quantile(samples_ms, ratio, level=1 - 2 * alpha)
    over = int((samples_ms > limit_ms).sum())
    seen = f"{over} of {samples_ms.size} requests above the limit of {limit_ms:g} ms"
    if found.upper is not None and found.upper <= limit_ms:
        return LimitCheck(Verdict.ACCEPT, 0, f"{seen}; one-sided upper bound {found.upper:.4g} ms")
    if found.lower is not None and found.lower > limit_ms:
        return LimitCheck(Verdict.REJECT, 0, f"{seen}; one-sided lower bound {found.lower:.4g} ms")
    excess = abs(over / samples_ms.size - (1 - ratio))
    needed = samples_for_upper_bound(ratio, level=1 - alpha)
    if over and excess:
        needed = max(needed, math.ceil(ratio * (1 - ratio) * (normal_quantile(1 - alpha) / excess) ** 2))
    return LimitCheck(Verdict.INCONCLUSIVE, max(1, needed - samples_ms.size), f"{seen}; the bounds enclose the limit")
