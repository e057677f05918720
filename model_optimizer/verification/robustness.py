"""The robustness measures: what the soak and the load saw go wrong."""

from collections.abc import Iterator

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Verdict
from model_optimizer.artifacts.verification import Growth, SoakResult
from model_optimizer.verification.gates import exact
from model_optimizer.verification.soak_summary import DAILY_GROWTH_RATIO

SLOPE_GATE_S = 3600.0
"""A shorter soak cannot bound a leak: after 30 min with readings that scatter by 1 MB the slope is known to about 1 MB/h only."""
SLOW_DOWN_RATIO = 1.1
"""The reference workload may take so much longer at the end, against the control arm's."""
HOST_CLOCK_STEP_S = 1.0
"""A wall clock that is slewed moves by 0.5 ms in a second at most (adjtimex); a second in a minute is a step."""
CHECKS = {
    "crashes": "processes that ended by themselves",
    "page_faults": "looks at the page pool that found a page lost, doubled, shared or held",
    "clock_faults": "tokens whose time lies before the one before them, or in the future",
    "wrong_scores": "requests whose tokens the engine scores differently when it scores them alone",
    "failed_trials": "extremes (length jump, batch swings, refusals, edge prompts) that went wrong",
}


def robustness_measures(soak: SoakResult, num_non_finite: int, num_load_failed: int, peak_bytes: int) -> tuple[Measure, ...]:
    """Return failures, non-finite values, canaries, invariants, growth, latency drift and how sure the soak was of each.

    `num_non_finite` counts golden-set scores, `num_load_failed` failed requests of the latency run: both add to the soak's own.
    """
    ran = f"in {soak.ran_s:.0f} s of soak and {soak.num_requests} requests"
    failed, non_finite = soak.num_failed + num_load_failed, soak.num_non_finite + num_non_finite
    return (
        _count("failed_requests", failed, soak.num_requests, f"{ran}; latency run included"),
        _count("non_finite", non_finite, soak.num_tokens, f"log-probabilities {ran}; golden sets included"),
        _count("wrong_canaries", soak.num_wrong_canaries, soak.num_canaries, f"fixed prompts whose tokens changed {ran}"),
        *_invariants(soak),
        _slope(soak, peak_bytes),
        *(_growth(soak, growth) for growth in soak.growth),
        *_timing(soak),
    )


def soak_measure(soak: SoakResult, required_s: float) -> Measure:
    """Return how long the soak was against what a final sign-off requires; too short is provisional, not a failure."""
    short = soak.ran_s < required_s
    accelerated = soak.equivalent_s > soak.ran_s
    missing = f"; it stands for {soak.equivalent_s / 3600:.3g} h of requests, which real hours it does not replace" * accelerated
    untested = f"; {soak.gap_s:.0f} s between its processes were not tested" * (soak.gap_s > 0)
    stopped = f"; stopped early: {soak.stopped_because}" if soak.stopped_because else ""
    return Measure(
        name="soak",
        dimension=Dimension.ROBUSTNESS,
        unit="s",
        value=soak.ran_s,
        limit=required_s,
        higher_is_better=True,
        num_samples=soak.num_requests,
        reason=(
            f"shorter than the {required_s:g} s that a final sign-off requires: provisional; what shows later was not tested"
            if short
            else f"as long as required; {soak.num_segments} segments in {soak.num_sessions} sessions"
        )
        + missing
        + untested
        + stopped,
    )


def _invariants(soak: SoakResult) -> Iterator[Measure]:
    """Yield what must never happen, each with how often it was looked for."""
    for tally in soak.tallies:
        first = f"; first: {tally.first}" if tally.first else ""
        yield _count(tally.check, tally.num_found, tally.num_checked, f"{CHECKS[tally.check]}{first}")
    if soak.num_digests:
        changed = "runs of the fixed prompts that differ in a bit from the first of their process"
        yield _bits("changed_bits", soak.num_changed_digests, soak.num_digests, changed, gates=soak.is_deterministic)
    if soak.num_drift_samples:
        moved = (
            f"drift samples whose scores differ in a bit from the first; the mean moved by {soak.drift_nats:.3g} nats and "
            f"{soak.num_drift_flips} tokens flipped at most"
        )
        yield _count("drifted_samples", soak.num_drifted_samples, soak.num_drift_samples, moved)
    if soak.has_control:
        apart = "segments in which the control process gave other bits than the soaked one on the same prompts"
        yield _bits("control_mismatches", soak.num_control_mismatches, soak.num_segments, apart, gates=soak.is_deterministic)


def _timing(soak: SoakResult) -> Iterator[Measure]:
    yield Measure(
        name="latency_drift",
        dimension=Dimension.ROBUSTNESS,
        unit="ratio",
        value=soak.p50_last_ms / soak.p50_first_ms if soak.p50_first_ms else 1.0,
        baseline=1.0,
        num_samples=soak.num_requests,
        reason="P50 of the last third of the soak over the first third; shown, does not gate",
    )
    if soak.latency_psi is not None:
        moved = "stability index of the end-to-end times, last third against first (0.2 and more: the distribution moved)"
        yield _shown("latency_shift", "psi", soak.latency_psi, soak.num_requests, moved)
    against = "of the fixed prompts at the end over the beginning, each against the control process at the same moment"
    if soak.slow_down_ratio is not None and soak.slow_down_interval is not None:
        yield _slower("slow_down", soak.slow_down_ratio, soak.slow_down_interval, f"time {against}")
    if soak.cpu_slow_down_ratio is not None and soak.cpu_slow_down_interval is not None:
        yield _slower("cpu_slow_down", soak.cpu_slow_down_ratio, soak.cpu_slow_down_interval, f"CPU time {against}")
    if soak.jitter_ms is not None:
        yield _shown("soak_jitter", "ms", soak.jitter_ms, soak.num_requests, "P99 - P50 end to end under steady and burst load")
        admitted = soak.num_requests + soak.num_preemptions
        yield Measure(
            name="allocation_success",
            dimension=Dimension.ROBUSTNESS,
            unit="ratio",
            value=(soak.num_requests - soak.num_failed) / admitted if admitted else 1.0,
            baseline=1.0,
            higher_is_better=True,
            num_samples=admitted,
            reason=f"requests that kept their memory to the end; {soak.num_preemptions} gave it back once and were computed anew",
        )
    if abs(soak.clock_step_s) > HOST_CLOCK_STEP_S:
        step = "the machine's wall clock jumped; durations come from the monotonic clock and stand"
        yield _shown("host_clock_step", "s", soak.clock_step_s, soak.num_segments, step)


def _slower(name: str, ratio: float, interval: Interval, reason: str) -> Measure:
    return Measure(
        name=name,
        dimension=Dimension.ROBUSTNESS,
        unit="ratio",
        value=ratio,
        baseline=1.0,
        interval=interval,
        limit=SLOW_DOWN_RATIO,
        verdict=_below(interval, SLOW_DOWN_RATIO),
        reason=reason,
    )


def _shown(name: str, unit: str, value: float, num_samples: int, reason: str) -> Measure:
    """Return a figure that does not gate."""
    return Measure(
        name=name,
        dimension=Dimension.ROBUSTNESS,
        unit=unit,
        value=value,
        num_samples=num_samples,
        reason=f"{reason}; does not gate",
    )


def _count(name: str, value: int, num_samples: int, reason: str) -> Measure:
    """Return a count that must be zero."""
    return Measure(
        name=name,
        dimension=Dimension.ROBUSTNESS,
        unit="count",
        value=value,
        limit=0,
        num_samples=num_samples,
        verdict=exact(value == 0),
        reason=reason,
    )


def _bits(name: str, value: int, num_samples: int, reason: str, *, gates: bool) -> Measure:
    """Return a count of runs that differ in a bit; it gates where the engine gave the same bits to begin with."""
    measure = _count(name, value, num_samples, reason)
    if gates:
        return measure
    why = f"{reason}; this engine never gave the same bits twice, so tokens and scores gate instead"
    return measure.model_copy(update={"verdict": None, "reason": why})


def _growth(soak: SoakResult, growth: Growth) -> Measure:
    """Return whether a counter grows; it gates against a control arm, or once the soak is long enough to do without."""
    gates = soak.has_control or soak.ran_s >= SLOPE_GATE_S
    alone = growth.control_verdict is Verdict.REJECT
    against = "less that of the control process" if soak.has_control else "no control process to compare with"
    reason = f"bound on the slope per tested hour at quiesced moments, {against}, {growth.num_points} readings"
    if alone:
        reason += f"; the control process grows by {growth.control_per_hour:.3g} an hour without any load"
    if not gates:
        reason += f"; {soak.ran_s:.0f} s are too short without one ({SLOPE_GATE_S:g} s), so it does not gate"
    return Measure(
        name=f"{growth.counter}_growth",
        dimension=Dimension.ROBUSTNESS,
        unit=f"{growth.unit}_per_hour",
        value=growth.per_hour,
        interval=growth.interval,
        limit=growth.budget_per_hour,
        num_samples=growth.num_points,
        verdict=(Verdict.REJECT if alone else growth.verdict) if gates else None,
        reason=reason,
    )


def _slope(soak: SoakResult, peak_bytes: int) -> Measure:
    """Return the growth of the resident size; it gates once the soak is long enough, and where no allocator tells more."""
    limit = peak_bytes * DAILY_GROWTH_RATIO / 24
    long_enough = soak.ran_s >= SLOPE_GATE_S
    told = any(growth.counter == "heap" for growth in soak.growth)
    why = "; the allocator's own counters gate instead" if told else ""
    if not long_enough:
        why = f"; {soak.ran_s:.0f} s are too short to bound a leak ({SLOPE_GATE_S:g} s), so it does not gate"
    return Measure(
        name="memory_slope",
        dimension=Dimension.ROBUSTNESS,
        unit="bytes_per_hour",
        value=soak.memory_slope_bytes_per_hour,
        interval=soak.memory_slope_interval,
        limit=limit,
        verdict=_below(soak.memory_slope_interval, limit) if long_enough and not told else None,
        reason=f"Theil-Sen over resident sizes at quiesced moments{why}",
    )


def _below(interval: Interval, limit: float) -> Verdict:
    if interval.upper <= limit:
        return Verdict.ACCEPT
    return Verdict.REJECT if interval.lower > limit else Verdict.INCONCLUSIVE
