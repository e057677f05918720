"""The robustness measures: what the soak and the load saw go wrong."""

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Verdict
from model_optimizer.artifacts.verification import SoakResult
from model_optimizer.verification.gates import exact

SLOPE_GATE_S = 3600.0
"""A shorter soak cannot bound a leak: after 30 min with readings that scatter by 1 MB the slope is known to about 1 MB/h only."""
DAILY_GROWTH_RATIO = 0.01
"""Allowed growth in 24 hours, as a share of the measured peak memory."""


def robustness_measures(soak: SoakResult, num_non_finite: int, num_load_failed: int, peak_bytes: int) -> tuple[Measure, ...]:
    """Return failures, non-finite values, canaries, memory slope, latency drift and how long the soak was.

    `num_non_finite` counts golden-set scores, `num_load_failed` failed requests of the latency run: both add to the soak's own.
    """
    ran = f"in {soak.ran_s:.0f} s of soak and {soak.num_requests} requests"
    failed, non_finite = soak.num_failed + num_load_failed, soak.num_non_finite + num_non_finite
    return (
        _count("failed_requests", failed, soak.num_requests, f"{ran}; latency run included"),
        _count("non_finite", non_finite, soak.num_tokens, f"log-probabilities {ran}; golden sets included"),
        _count("wrong_canaries", soak.num_wrong_canaries, soak.num_canaries, f"fixed prompts whose tokens changed {ran}"),
        _slope(soak, peak_bytes),
        Measure(
            name="latency_drift",
            dimension=Dimension.ROBUSTNESS,
            unit="ratio",
            value=soak.p50_last_ms / soak.p50_first_ms if soak.p50_first_ms else 1.0,
            baseline=1.0,
            num_samples=soak.num_requests,
            reason="P50 of the last third of the soak over the first third; shown, does not gate",
        ),
    )


def soak_measure(soak: SoakResult, required_s: float) -> Measure:
    """Return how long the soak was against what a final sign-off requires; too short is provisional, not a failure."""
    short = soak.ran_s < required_s
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
        ),
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


def _slope(soak: SoakResult, peak_bytes: int) -> Measure:
    """Return the growth of memory; it gates once the soak is long enough to bound it."""
    limit = peak_bytes * DAILY_GROWTH_RATIO / 24
    long_enough = soak.ran_s >= SLOPE_GATE_S
    return Measure(
        name="memory_slope",
        dimension=Dimension.ROBUSTNESS,
        unit="bytes_per_hour",
        value=soak.memory_slope_bytes_per_hour,
        interval=soak.memory_slope_interval,
        limit=limit,
        verdict=_below(soak.memory_slope_interval, limit) if long_enough else None,
        reason="Theil-Sen over resident sizes at quiesced moments"
        + (
            "" if long_enough else f"; {soak.ran_s:.0f} s are too short to bound a leak ({SLOPE_GATE_S:g} s), so it does not gate"
        ),
    )


def _below(interval: Interval, limit: float) -> Verdict:
    if interval.upper <= limit:
        return Verdict.ACCEPT
    return Verdict.REJECT if interval.lower > limit else Verdict.INCONCLUSIVE
