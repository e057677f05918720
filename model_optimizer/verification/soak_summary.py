"""What all segments of a soak saw together; a pure function of the records, so that a killed soak is judged like any other."""

import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from model_optimizer.artifacts.measure import Interval
from model_optimizer.artifacts.verification import Growth, SoakResult
from model_optimizer.measurement.energy import summed
from model_optimizer.measurement.process import Counters
from model_optimizer.verification.soak_drift import compare
from model_optimizer.verification.soak_leak import GATE_LEVEL, WARM_UP_RATIO, judge, trend
from model_optimizer.verification.soak_records import MemoryPoint, Segment, merged

T = TypeVar("T")

MIN_SLOPE_POINTS = 3
DAILY_GROWTH_RATIO = 0.01
"""Allowed growth in 24 hours of traffic, as a share of the process's largest size."""
MIN_DAILY_GROWTH_BYTES = 2**20
"""Below it the C library's own caches are told from a leak by luck alone."""
BLOCK_BYTES = 100
"""What a small object of the interpreter is reckoned at: sys.getsizeof of a float is 24, of a small dict 184."""
HANDLES_PER_HOUR = 0.5
"""Allowed growth of open files and of threads: 1024 files, the usual limit, then last 85 days."""


class _Counter(NamedTuple):
    name: str
    unit: str
    read: Callable[[Counters], float | None]
    budget_per_hour: float


def summarise_soak(records: Sequence[Segment], requested_s: float) -> SoakResult:
    """Return what all segments saw together; the same records give the same result."""
    ran = [record for record in records if record.num_requests]
    if not ran:
        return _nothing(records, requested_s)
    reference = ran[0].canaries[0]
    outputs = [output for record in ran for output in record.canaries]
    latencies_ms = np.array([value for record in ran for value in record.end_to_end_ms] or [0.0])
    third = max(1, latencies_ms.size // 3)
    slope, interval = _memory_slope(ran)
    result = SoakResult(
        requested_s=requested_s,
        ran_s=sum(record.ran_s for record in ran),
        num_segments=len(ran),
        num_requests=sum(record.num_requests for record in ran),
        num_failed=sum(record.num_failed for record in ran),
        num_non_finite=sum(record.num_non_finite for record in ran),
        num_canaries=sum(len(output) for output in outputs),
        num_wrong_canaries=sum(
            tokens != expected for output in outputs for tokens, expected in zip(output, reference, strict=True)
        ),
        memory_slope_bytes_per_hour=slope,
        memory_slope_interval=interval,
        p50_first_ms=float(np.median(latencies_ms[:third])),
        p50_last_ms=float(np.median(latencies_ms[-third:])),
        num_sessions=len({record.session for record in ran}),
        num_tokens=sum(record.num_tokens for record in ran),
        equivalent_s=sum(record.stands_for_s for record in ran),
        gap_s=_gap_s(records),
        tallies=merged(tally for record in records for tally in record.tallies),
        latency_psi=compare(latencies_ms[:third].tolist(), latencies_ms[-third:].tolist()).psi,
        jitter_ms=float(np.subtract(*np.percentile(latencies_ms, (99, 50)))),
        num_preemptions=sum(max(held) for held in _by_session(ran, lambda record: record.num_preemptions)),
        peak_bytes=max(record.peak_rss_bytes for record in ran),
        clock_step_s=max((record.clock_step_s for record in ran), key=abs),
        output_digest=hashlib.sha256("".join(record.output_digest for record in ran).encode()).hexdigest(),
    )
    return result.model_copy(update=_usage(ran) | _drift(ran) | _digests(ran) | _growth(ran, result.peak_bytes))


def _nothing(records: Sequence[Segment], requested_s: float) -> SoakResult:
    """Return the result of a soak that never got through a segment."""
    return SoakResult(
        requested_s=requested_s, ran_s=0, num_segments=0, num_requests=0, num_failed=0, num_non_finite=0, num_wrong_canaries=0,
        memory_slope_bytes_per_hour=0, memory_slope_interval=Interval(lower=0, upper=0), p50_first_ms=0, p50_last_ms=0,
        num_sessions=len({record.session for record in records}),
        tallies=merged(tally for record in records for tally in record.tallies),
    )  # fmt: skip


def _by_session(records: Sequence[Segment], read: Callable[[Segment], T]) -> list[list[T]]:
    sessions: dict[int, list[T]] = {}
    for record in records:
        sessions.setdefault(record.session, []).append(read(record))
    return list(sessions.values())


def _gap_s(records: Sequence[Segment]) -> float:
    """Return the time between one process's last record and the next one's first."""
    return sum(
        max(0.0, late.began_unix_s - early.ended_unix_s) for early, late in pairwise(records) if early.session != late.session
    )


def _usage(records: Sequence[Segment]) -> dict[str, object]:
    used = summed([record.usage for record in records if record.usage])
    if used is None:
        return {}
    return {
        "metered_s": used.wall_s,
        "energy_j": used.total_j,
        "idle_w": used.idle_w,
        "energy_source": used.source,
        "sm_ratio": used.sm_ratio,
        "kernel_ratio": used.kernel_ratio,
    }


def _drift(records: Sequence[Segment]) -> dict[str, int | float]:
    """Compare every drift sample with the first one."""
    samples = [record.drift for record in records if record.drift]
    if not samples:
        return {}
    first = samples[0]

    def flips(greedy: str) -> int:
        return (int(greedy, 16) ^ int(first.greedy, 16)).bit_count()

    return {
        "num_drift_samples": len(samples),
        "num_drifted_samples": sum(sample.digest != first.digest for sample in samples),
        "drift_nats": max((sample.mean_log_prob_nats - first.mean_log_prob_nats for sample in samples), key=abs),
        "num_drift_flips": max(flips(sample.greedy) for sample in samples),
    }


def _digests(records: Sequence[Segment]) -> dict[str, int | bool]:
    """Compare every run of the canaries with the first of its process, and with the control arm at the same moment."""
    sessions = [[one for some in held for one in some] for held in _by_session(records, lambda record: record.canary_digests)]
    begun = [held[0] for held in _by_session(records, lambda record: record.canary_digests)]
    return {
        "num_digests": sum(len(digests) for digests in sessions),
        "is_deterministic": all(len(set(digests)) <= 1 for digests in begun),
        "num_changed_digests": sum(digest != digests[0] for digests in sessions for digest in digests),
        "num_control_mismatches": sum(
            record.control.digest != record.canary_digests[-1] for record in records if record.control and record.canary_digests
        ),
    }


def _growth(records: Sequence[Segment], peak_bytes: int) -> dict[str, object]:
    """Judge every counter, and the reference workload's time, over the longest run of one process."""
    longest = max(_by_session(records, lambda record: record), key=len)
    read = [(record, record.counters, record.control) for record in longest if record.counters]
    hours = list(np.cumsum([record.stands_for_s for record, _, _ in read]) / 3600)
    has_control = bool(read) and all(control for _, _, control in read)
    found = []
    for counter in _counters(peak_bytes):
        mine = [counter.read(counters) for _, counters, _ in read]
        other = [counter.read(control.counters) if control else None for _, _, control in read]
        if judged := _judge(counter, hours, mine, other if has_control else None):
            found.append(judged)
    stable = [counters.rss_bytes for _, counters, _ in read[int(len(read) * WARM_UP_RATIO) :]]
    fields: dict[str, object] = {
        "growth": tuple(found),
        "has_control": has_control,
        "stable_bytes": int(np.median(stable)) if stable else 0,
    }
    if has_control:
        pairs = [(record, control) for record, _, control in read if control]
        wall = _slow_down(hours, [(record.canary_s, control.wall_s) for record, control in pairs])
        cpu = _slow_down(hours, [(record.canary_cpu_s, control.cpu_s) for record, control in pairs])
        for name, found_ratio in (("slow_down", wall), ("cpu_slow_down", cpu)):
            if found_ratio:
                fields |= {f"{name}_ratio": found_ratio[0], f"{name}_interval": found_ratio[1]}
    return fields


def _counters(peak_bytes: int) -> tuple[_Counter, ...]:
    bytes_per_hour = max(DAILY_GROWTH_RATIO * peak_bytes, MIN_DAILY_GROWTH_BYTES) / 24

    def between(counters: Counters) -> float | None:
        return None if counters.heap_bytes is None else counters.anonymous_bytes - counters.heap_bytes

    return (
        _Counter("heap", "bytes", lambda counters: counters.heap_bytes, bytes_per_hour),
        _Counter("device_memory", "bytes", lambda counters: counters.device_bytes, bytes_per_hour),
        _Counter("fragmentation", "bytes", between, bytes_per_hour),
        _Counter("python_objects", "blocks", lambda counters: counters.python_blocks, bytes_per_hour / BLOCK_BYTES),
        _Counter("open_files", "count", lambda counters: counters.num_fds, HANDLES_PER_HOUR),
        _Counter("threads", "count", lambda counters: counters.num_threads, HANDLES_PER_HOUR),
    )


def _judge(
    counter: _Counter, hours: Sequence[float], mine: Sequence[float | None], control: Sequence[float | None] | None
) -> Growth | None:
    """Judge one counter; None where it is not told or there are too few readings."""
    known = [value for value in mine if value is not None]
    if len(known) < len(hours):
        return None
    base = [value for value in control if value is not None] if control else [0.0] * len(known)
    if len(base) < len(known):
        return None
    net = judge(hours, [value - other for value, other in zip(known, base, strict=True)], counter.budget_per_hour)
    alone = judge(hours, base, counter.budget_per_hour) if control else None
    if net is None:
        return None
    slope, verdict = net
    return Growth(
        counter=counter.name,
        unit=counter.unit,
        per_hour=slope.per_hour,
        interval=slope.interval(),
        budget_per_hour=counter.budget_per_hour,
        num_points=slope.num_points,
        verdict=verdict,
        control_per_hour=alone[0].per_hour if alone else None,
        control_verdict=alone[1] if alone else None,
    )


def _slow_down(hours: Sequence[float], pairs: Sequence[tuple[float, float]]) -> tuple[float, Interval] | None:
    """Return by what factor the reference workload's time changed against the control's, over the whole span.

    The lower bound is the more cautious of two: of the trend, and how far the last third lies above the first, quartile from
    quartile. A neighbour who came for a while bends a trend; it does not keep a whole third apart.
    """
    if min(min(pair) for pair in pairs) <= 0:
        return None
    logs = np.log([mine / other for mine, other in pairs])
    found = trend(hours, logs.tolist())
    if found is None:
        return None
    span, third = hours[-1] - hours[0], max(1, len(logs) // 3)
    apart = float(np.quantile(logs[-third:], 0.25) - np.quantile(logs[:third], 0.75))
    bounds = (min(found.lower * span, apart), found.per_hour * span, found.upper * span)
    low, middle, high = (float(np.exp(np.clip(it, -20, 20))) for it in bounds)
    return middle, Interval(lower=low, upper=high, level=GATE_LEVEL)


def _memory_slope(records: Sequence[Segment]) -> tuple[float, Interval]:
    """Return the Theil-Sen slope of the resident size with its 95 % interval, the longest session's start left out.

    Source: Sen, Estimates of the regression coefficient based on Kendall's tau, JASA 63, 1968.
    """
    from scipy.stats import theilslopes

    sessions: list[list[MemoryPoint]] = [
        [point for some in held for point in some] for held in _by_session(records, lambda record: record.memory)
    ]
    longest = max(sessions, key=len)
    points = longest[max(0, min(int(len(longest) * WARM_UP_RATIO), len(longest) - MIN_SLOPE_POINTS)) :]
    points = points[:: max(1, len(points) // 1500)]
    if len(points) < 2:
        return 0.0, Interval(lower=0, upper=0)
    hours = np.array([point.at_s for point in points]) / 3600
    slope, _, lower, upper = theilslopes(np.array([point.rss_bytes for point in points]), hours, alpha=0.95)
    return float(slope), Interval(lower=float(lower), upper=float(upper))
