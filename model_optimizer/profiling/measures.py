"""The figures of the profile stage, each with its origin."""

from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from model_optimizer.artifacts.target import BudgetLine
from model_optimizer.profiling.budget import part_bytes, total_bytes
from model_optimizer.profiling.current import current_state
from model_optimizer.profiling.feasibility import GIB, RATE_HEADROOM, Ask, best_case

_ROOFLINE = "roofline at the measured rates; unquantized"


def measures(ask: Ask, budget: tuple[BudgetLine, ...], source_bytes: int | None) -> tuple[Measure, ...]:
    """Return what was measured on the device and predicted for the unquantized model."""
    return (*_device(ask), *_model(ask, source_bytes), *_predictions(ask, budget))


def _device(ask: Ask) -> tuple[Measure, ...]:
    """Return the micro-benchmarks."""
    device = ask.device
    rates = {
        ("copy_bandwidth", "bytes_per_s"): device.copy_bytes_per_s,
        ("read_bandwidth", "bytes_per_s"): device.read_bytes_per_s,
        ("matmul_rate", "flop_per_s"): device.matmul_flop_per_s,
    }
    return tuple(
        Measure(name=name, dimension=Dimension.SPEED, unit=unit, value=value, higher_is_better=True)
        for (name, unit), value in rates.items()
    )


def _model(ask: Ask, source_bytes: int | None) -> tuple[Measure, ...]:
    """Return sizes that are counted, not estimated."""
    facts = ask.model
    counts: dict[tuple[str, str], float] = {
        ("parameters", "count"): facts.num_parameters,
        ("linear_parameters", "count"): facts.num_linear_parameters,
        ("kv_per_token", "bytes"): facts.kv_bytes_per_token,
        ("checkpoint", "bytes"): sum(facts.bytes_by_part.values()),
    }
    if source_bytes is not None:
        counts["source_file", "bytes"] = source_bytes
    return tuple(
        Measure(name=name, dimension=Dimension.RESOURCE, unit=unit, value=value, reason="counted from headers and config")
        for (name, unit), value in counts.items()
    )


def _predictions(ask: Ask, budget: tuple[BudgetLine, ...]) -> tuple[Measure, ...]:
    """Return what the unquantized model is predicted to need and to do, beside the stated limits."""
    now, sla = current_state(ask), ask.sla

    def predicted(name: str, dimension: Dimension, unit: str, value: float, limit: float | None = None) -> Measure:
        faster = unit == "tok_per_s"
        return Measure(
            name=name,
            dimension=dimension,
            unit=unit,
            value=value,
            limit=limit,
            higher_is_better=faster,
            origin=Origin.PREDICTED,
            reason=_ROOFLINE if dimension is Dimension.SPEED else "budget table; unquantized",
        )

    bound = best_case(ask).throughput_tok_per_s
    memory_limit = None if sla.memory_gib is None else sla.memory_gib * GIB
    return (
        predicted("predicted_throughput", Dimension.SPEED, "tok_per_s", now.throughput_tok_per_s, sla.throughput_tok_per_s),
        predicted("predicted_single_stream", Dimension.SPEED, "tok_per_s", 1 / now.step_alone_s),
        predicted("predicted_p95_latency", Dimension.SPEED, "ms", now.p95_latency_ms, sla.p95_latency_ms),
        predicted("predicted_ttft", Dimension.SPEED, "ms", now.ttft_ms),
        predicted("best_case_throughput", Dimension.SPEED, "tok_per_s", bound, sla.throughput_tok_per_s).model_copy(
            update={"reason": f"bound for any engine here: 4-bit weights, {RATE_HEADROOM:g} x the measured rates, no overhead"}
        ),
        predicted("predicted_weights", Dimension.RESOURCE, "bytes", part_bytes(budget, "weights")),
        predicted("predicted_kv_reservation", Dimension.RESOURCE, "bytes", part_bytes(budget, "kv_reservation")),
        predicted("predicted_memory", Dimension.RESOURCE, "bytes", total_bytes(budget), memory_limit),
    )
