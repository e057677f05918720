"""The speed measures: percentiles against the service level, throughput, and the ratio to the baseline."""

import numpy as np

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Origin, Verdict
from model_optimizer.artifacts.verification import LatencyResult
from model_optimizer.measurement.paired import bootstrap_mean
from model_optimizer.measurement.percentiles import samples_for_upper_bound
from model_optimizer.spec import Sla
from model_optimizer.verification.latency import BASELINE, CANDIDATE, LatencyRun, check_limit

SLOWER_RATIO = 0.95
"""Where the service level states no speed, the choice may be this much slower than the baseline: block-to-block noise of a shared
two-core machine is about 5 %."""


def speed_measures(run: LatencyRun, results: tuple[LatencyResult, LatencyResult], sla: Sla, alpha: float) -> tuple[Measure, ...]:
    """Return latency, TTFT, ITL, jitter, throughput and speed ratio of the candidate, the baseline beside it."""
    limits = {"p50": sla.p50_latency_ms, "p95": sla.p95_latency_ms, "p99": sla.p99_latency_ms, "ttft_p95": sla.ttft_p95_ms}
    names = ("p50", "p95", "p99", "ttft_p50", "ttft_p95", "itl_p50", "itl_p95")
    latencies = [_latency(run, results, name, limits.get(name), alpha) for name in names if name in results[0].percentiles_ms]
    gated = any(limits[name] for name in ("p50", "p95", "ttft_p95")) or sla.throughput_tok_per_s is not None
    return (*latencies, *_jitter(results), _throughput(run, results, sla, alpha), _speed_ratio(run, gated, results))


def _latency(
    run: LatencyRun, results: tuple[LatencyResult, LatencyResult], name: str, limit_ms: float | None, alpha: float
) -> Measure:
    candidate, baseline = results
    record = run.joined(CANDIDATE)
    samples_ms = {"ttft": record.ttft_ms, "itl": record.itl_ms}.get(name.partition("_")[0], record.end_to_end_ms)()
    ratio = int(name[-2:]) / 100
    verdict, needed, notes = None, None, list[str]()
    if limit_ms is not None and name != "p99":
        check = check_limit(samples_ms, ratio, limit_ms, alpha=alpha)
        verdict, needed = check.verdict, check.samples_needed
        notes.append(check.reason)
    elif name == "p99":
        notes.append("shown, does not gate")
    if name not in candidate.intervals_ms:
        least = samples_for_upper_bound(ratio, level=0.975)
        enough = "gaps of one request are not independent" if name.startswith("itl") else f"a finite bound takes {least} samples"
        notes.append(f"no interval: {enough}")
    return Measure(
        name=f"{name}_latency" if "_" not in name else f"{name.partition('_')[2]}_{name.partition('_')[0]}",
        dimension=Dimension.SPEED,
        unit="ms",
        value=candidate.percentiles_ms[name],
        baseline=baseline.percentiles_ms.get(name),
        interval=candidate.intervals_ms.get(name),
        limit=limit_ms,
        num_samples=samples_ms.size,
        samples_needed=needed,
        verdict=verdict,
        reason="; ".join(notes),
    )


def _jitter(results: tuple[LatencyResult, LatencyResult]) -> tuple[Measure, ...]:
    """Return P99 - P50 of the end-to-end latency."""
    spreads = [found.percentiles_ms["p99"] - found.percentiles_ms["p50"] for found in results if "p99" in found.percentiles_ms]
    if len(spreads) < len(results):
        return ()
    samples = results[0].num_requests - results[0].num_failed
    return (
        Measure(
            name="jitter", dimension=Dimension.SPEED, unit="ms", value=spreads[0], baseline=spreads[1],
            num_samples=samples, reason="P99 - P50 of the end-to-end latency",
        ),
    )  # fmt: skip


def _throughput(run: LatencyRun, results: tuple[LatencyResult, LatencyResult], sla: Sla, alpha: float) -> Measure:
    rounds = run.throughput_tok_per_s(CANDIDATE)
    _, interval = bootstrap_mean(rounds, seed=run.seed)
    _, bounds = bootstrap_mean(rounds, seed=run.seed, level=1 - 2 * alpha)
    return Measure(
        name="throughput",
        dimension=Dimension.SPEED,
        unit="tok_per_s",
        value=float(np.mean(rounds)),
        baseline=float(np.mean(run.throughput_tok_per_s(BASELINE))),
        interval=interval,
        limit=sla.throughput_tok_per_s,
        higher_is_better=True,
        num_samples=len(rounds),
        verdict=None if sla.throughput_tok_per_s is None else above(bounds, sla.throughput_tok_per_s),
        reason=f"output tokens of all {results[0].concurrency} streams, prefill included; mean of interleaved rounds",
    )


def _speed_ratio(run: LatencyRun, gated_elsewhere: bool, results: tuple[LatencyResult, LatencyResult]) -> Measure:
    candidate, baseline = results
    ratio = run.speed_ratio()
    if ratio is None:
        return Measure(
            name="speed_ratio", dimension=Dimension.SPEED, unit="ratio", value=None, higher_is_better=True,
            verdict=Verdict.REJECT, origin=Origin.NOT_MEASURED, reason="a round produced no tokens",
        )  # fmt: skip
    if candidate.strategy == baseline.strategy:
        verdict, why = Verdict.ACCEPT, "the choice is the baseline; the ratio shows the measuring noise"
    else:
        verdict, why = above(ratio.interval, SLOWER_RATIO), f"{candidate.strategy} over {baseline.strategy}"
    return Measure(
        name="speed_ratio",
        dimension=Dimension.SPEED,
        unit="ratio",
        value=ratio.value,
        baseline=1.0,
        interval=ratio.interval,
        limit=None if gated_elsewhere else SLOWER_RATIO,
        higher_is_better=True,
        num_samples=ratio.num_pairs,
        verdict=None if gated_elsewhere else verdict,
        reason=f"{why}; throughput in interleaved rounds" + ("; the service level gates speed" if gated_elsewhere else ""),
    )


def above(interval: Interval, limit: float) -> Verdict:
    """Return ACCEPT when the whole interval lies at or above the limit, REJECT when below it."""
    if interval.lower >= limit:
        return Verdict.ACCEPT
    return Verdict.REJECT if interval.upper < limit else Verdict.INCONCLUSIVE
