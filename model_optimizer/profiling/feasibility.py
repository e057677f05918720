"""Which limits no engine could meet here: each is set against a bound that is optimistic on purpose.

The bound takes every multiplied weight at 4 bits without scales, caches kept warm, integer units at their peak, no overhead,
and three times the measured rates, since a busy machine measures low. Only what even that forbids is refused; speculative
decoding, which needs fewer steps than tokens, is outside of it.
"""

from dataclasses import dataclass, replace

from model_optimizer.artifacts.target import DeviceFacts, ModelFacts
from model_optimizer.prediction.roofline import (
    BEST_WEIGHT_BITS,
    Rates,
    best_case_cost,
    best_case_rates,
    decode_step_s,
    decode_tok_per_s,
    prefill_s,
)
from model_optimizer.spec import Sla, Traffic

RATE_HEADROOM = 3.0
"""Measured rates may be this much below what the machine can do when nothing else runs.
Source: the spread of one decode benchmark on a shared 2-core machine, 3x with its neighbours."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Ask:
    """A device, a model, and what is asked of the two."""

    device: DeviceFacts
    model: ModelFacts
    sla: Sla
    traffic: Traffic
    run_bits: int
    """Bits per value of unquantized weights and cache on this device."""


@dataclass(frozen=True, slots=True)
class BestCase:
    """What no engine here can beat."""

    throughput_tok_per_s: float
    p50_latency_ms: float
    p95_latency_ms: float
    ttft_p95_ms: float
    memory_bytes: int


def best_case(ask: Ask) -> BestCase:
    """Return the bounds.

    Latency: a request of the stated output length, alone on the machine, with an empty context. Throughput: half of the prompts
    are at least p50 long, so that the mean context is at least half of it. Time to first token: a p95 prompt, alone.
    """
    cost, rates = best_case_cost(ask.model), _with_headroom(best_case_rates(ask.device))
    step_s = decode_step_s(cost, rates)
    prompt, output = ask.traffic.prompt_tokens, ask.traffic.output_tokens
    longest = ask.sla.max_model_len - 1
    return BestCase(
        throughput_tok_per_s=decode_tok_per_s(cost, rates, batch=ask.sla.concurrency, context=min(prompt.p50, longest) / 2),
        p50_latency_ms=1000 * min(output.p50, longest) * step_s,
        p95_latency_ms=1000 * min(output.p95, longest) * step_s,
        ttft_p95_ms=1000 * prefill_s(cost, rates, min(prompt.p95, longest)),
        memory_bytes=smallest_memory_bytes(ask),
    )


def smallest_memory_bytes(ask: Ask) -> int:
    """Return all parameters at 4 bits, and the cache of `concurrency` requests of median length; nothing else."""
    weights = ask.model.num_parameters * BEST_WEIGHT_BITS // 8
    tokens = min(ask.traffic.prompt_tokens.p50 + ask.traffic.output_tokens.p50, ask.sla.max_model_len)
    return weights + ask.sla.concurrency * kv_bytes(ask.model, tokens)


def kv_bytes(facts: ModelFacts, num_tokens: int) -> int:
    """Return the cache of one sequence; a sliding layer keeps its window at most."""
    return sum(layer.bytes_per_token * min(num_tokens, layer.max_tokens or num_tokens) for layer in facts.kv)


def infeasible(ask: Ask) -> tuple[str, ...]:
    """Return one sentence per limit that is out of reach; () where none is."""
    bound, sla = best_case(ask), ask.sla
    reasons = []
    if sla.throughput_tok_per_s is not None and sla.throughput_tok_per_s > bound.throughput_tok_per_s:
        reasons.append(
            f"throughput_tok_per_s {sla.throughput_tok_per_s:g} at concurrency {sla.concurrency}, "
            f"at best {bound.throughput_tok_per_s:.4g}"
        )
    for name, limit_ms, best_ms in (
        ("p50_latency_ms", sla.p50_latency_ms, bound.p50_latency_ms),
        ("p95_latency_ms", sla.p95_latency_ms, bound.p95_latency_ms),
        ("p99_latency_ms", sla.p99_latency_ms, bound.p95_latency_ms),
        ("ttft_p95_ms", sla.ttft_p95_ms, bound.ttft_p95_ms),
    ):
        if limit_ms is not None and limit_ms < best_ms:
            reasons.append(f"{name} {limit_ms:g}, at best {best_ms:.4g}")
    if sla.memory_gib is not None and sla.memory_gib * GIB < bound.memory_bytes:
        reasons.append(
            f"memory_gib {sla.memory_gib:g}, weights at {BEST_WEIGHT_BITS} bits and cache need {bound.memory_bytes / GIB:.4g}"
        )
    if bound.memory_bytes > ask.device.memory_bytes:
        reasons.append(
            f"the device has {ask.device.memory_bytes / GIB:.4g} GiB, weights and cache need {bound.memory_bytes / GIB:.4g}"
        )
    if reasons:
        reasons.append(
            f"bound: {RATE_HEADROOM:g} x measured {ask.device.read_bytes_per_s / 1e9:.3g} GB/s and "
            f"{ask.device.matmul_flop_per_s / 1e9:.4g} GFLOP/s, {BEST_WEIGHT_BITS}-bit weights, no overhead"
        )
    return tuple(reasons)


def _with_headroom(rates: Rates) -> Rates:
    cached = rates.cached_read_bytes_per_s
    return replace(
        rates,
        read_bytes_per_s=RATE_HEADROOM * rates.read_bytes_per_s,
        flop_per_s=RATE_HEADROOM * rates.flop_per_s,
        cached_read_bytes_per_s=None if cached is None else RATE_HEADROOM * cached,
    )
