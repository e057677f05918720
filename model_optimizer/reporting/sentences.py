"""What a report says in words beside its tables."""

from model_optimizer.artifacts.report import Report
from model_optimizer.artifacts.verification import SoakResult
from model_optimizer.reporting.text import duration, number, quantity, size


def latency_sentence(report: Report) -> str:
    """Return how both engines were loaded, or why they were not."""
    latency = report.verification.latency
    if not latency:
        return f"Neither engine was timed{_because(report, 'throughput')}."
    return f"Both engines served the same requests in turn, {latency[0].concurrency} at once."


def soak_sentence(report: Report) -> str:
    """Return what the stress run saw, or why there was none."""
    soak = report.verification.soak
    if not soak.num_segments and not soak.ran_s:
        return f"The soak did not run{_because(report, 'soak')}."
    return (
        f"The soak ran {duration(soak.ran_s)} of {duration(soak.requested_s)}:"
        f" {soak.num_requests:,} requests, {soak.num_failed} failed,"
        f" {soak.num_non_finite} non-finite outputs, {soak.num_wrong_canaries} changed canaries; {_drift(soak)}."
    )


def _because(report: Report, name: str) -> str:
    """Return the reason of a measure that was not measured."""
    missing = (measure for measure in report.verification.measures if measure.name == name and measure.value is None)
    return next((f": {measure.reason}" for measure in missing), "")


def _drift(soak: SoakResult) -> str:
    slope = f"memory slope {size(soak.memory_slope_bytes_per_hour)} per hour"
    if not soak.num_requests:
        return slope
    first, last = quantity(soak.p50_first_ms, "ms"), quantity(soak.p50_last_ms, "ms")
    return f"median latency {first} at the start and {last} at the end; {slope}"


def parity_sentence(report: Report) -> str:
    """Return how closely the engine follows the checkpoint that it was built from."""
    parity = report.compiled.parity
    kl, allowed = quantity(parity.mean_kl_nats, "nats"), quantity(parity.tolerance_kl_nats, "nats")
    return (
        f"The engine against its checkpoint on the same {parity.num_tokens:,} tokens: mean KL {kl} (at most {allowed} allowed),"
        f" the same most likely token at {number(100 * parity.top1_agreement_ratio)} % of positions,"
        f" greedy text {'equal' if parity.greedy_tokens_equal else 'not equal'}:"
        f" parity {'holds' if parity.passed else 'does not hold'}."
    )
