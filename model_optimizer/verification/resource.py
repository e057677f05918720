"""The resource measures: engine bytes, process memory, planned concurrency and cost."""

from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Origin, Verdict
from model_optimizer.artifacts.memory import MemoryPlan
from model_optimizer.artifacts.verification import SoakResult
from model_optimizer.measurement.energy import Usage, energy_measures
from model_optimizer.measurement.paired import bootstrap_mean
from model_optimizer.memory.budget import binary_size
from model_optimizer.spec import Cost, Sla
from model_optimizer.verification.gates import exact
from model_optimizer.verification.latency import BASELINE, CANDIDATE, LatencyRun

GIB = 2**30


def engine_measure(candidate: CompiledModel, baseline: CompiledModel) -> Measure:
    """Return the engine's size; a quantized one must not exceed the baseline's."""
    quantized = candidate.strategy.weights.quantized
    label = f"{candidate.strategy.label} against {baseline.strategy.label} on disk"
    return Measure(
        name="engine",
        dimension=Dimension.RESOURCE,
        unit="bytes",
        value=candidate.engine.num_bytes,
        baseline=baseline.engine.num_bytes,
        limit=baseline.engine.num_bytes if quantized else None,
        verdict=exact(candidate.engine.num_bytes <= baseline.engine.num_bytes) if quantized else None,
        reason=label if quantized else f"{label}; an unquantized choice is not gated on size",
    )


def memory_measures(plan: MemoryPlan, sla: Sla) -> tuple[Measure, ...]:
    """Return peak process memory and the concurrency that really ran, both from the memory stage's check."""
    limit = None if sla.memory_gib is None else sla.memory_gib * GIB
    peak = Measure(
        name="process_peak",
        dimension=Dimension.RESOURCE,
        unit="bytes",
        value=plan.measured_peak_bytes,
        limit=limit,
        verdict=None if limit is None else exact(plan.measured_peak_bytes <= limit),
        reason=f"while {plan.ran_concurrency} requests ran at once; predicted {binary_size(plan.predicted_peak_bytes)}",
    )
    ran = Measure(
        name="concurrency",
        dimension=Dimension.RESOURCE,
        unit="count",
        value=plan.ran_concurrency,
        limit=plan.planned_concurrency,
        higher_is_better=True,
        verdict=exact(plan.ran_concurrency >= plan.planned_concurrency),
        reason=f"requests that really ran at the same time; the plan holds {plan.capacity_requests} of the p95 length",
    )
    return peak, ran


def soak_use_measures(soak: SoakResult) -> tuple[Measure, ...]:
    """Return what the soaked process took: memory at its peak and all the time, energy, and use of the GPU."""
    if not soak.num_segments:
        return ()
    told = f"of a process that answered {soak.num_requests} requests; weights, pages, framework and all"
    used = Usage(
        wall_s=soak.metered_s,
        total_j=soak.energy_j,
        idle_w=soak.idle_w,
        source=soak.energy_source or "nothing was metered",
        sm_ratio=soak.sm_ratio,
        kernel_ratio=soak.kernel_ratio,
    )
    peak = Measure(
        name="soak_peak",
        dimension=Dimension.RESOURCE,
        unit="bytes",
        value=soak.peak_bytes,
        num_samples=soak.num_segments,
        reason=f"largest resident size {told}",
    )
    stable = Measure(
        name="soak_stable",
        dimension=Dimension.RESOURCE,
        unit="bytes",
        value=soak.stable_bytes,
        num_samples=soak.num_segments,
        reason=f"median resident size at quiesced moments after warm-up {told}",
    )
    return peak, stable, *energy_measures(used, soak.num_requests, soak.num_tokens)


def cost_measure(run: LatencyRun, sla: Sla, cost: Cost, alpha: float) -> Measure:
    """Return the cost of 1000 requests at the measured rate; predicted, for the machine is assumed to be always busy."""
    limit, price = sla.cost_usd_per_1k_requests, cost.machine_usd_per_hour
    rounds = [record.requests_per_s() for record in run.rounds[CANDIDATE]]
    if price is None or min(rounds) == 0:
        return Measure(
            name="cost", dimension=Dimension.RESOURCE, unit="usd_per_1k_requests", value=None, limit=limit,
            verdict=None if limit is None else Verdict.INCONCLUSIVE, origin=Origin.NOT_MEASURED,
            reason="no price stated (cost.machine_usd_per_hour)" if price is None else "a round finished no request",
        )  # fmt: skip
    mean, shown = bootstrap_mean(rounds, seed=run.seed)
    _, bounds = bootstrap_mean(rounds, seed=run.seed, level=1 - 2 * alpha)
    dollars, gate = _cost(price, shown), _cost(price, bounds)
    baseline = [record.requests_per_s() for record in run.rounds[BASELINE]]
    verdict = None
    if limit is not None:
        verdict = Verdict.ACCEPT if gate.upper <= limit else Verdict.REJECT if gate.lower > limit else Verdict.INCONCLUSIVE
    return Measure(
        name="cost",
        dimension=Dimension.RESOURCE,
        unit="usd_per_1k_requests",
        value=_usd_per_1k(price, mean),
        baseline=_usd_per_1k(price, sum(baseline) / len(baseline)) if min(baseline) > 0 else None,
        interval=dollars,
        limit=limit,
        num_samples=len(rounds),
        verdict=verdict,
        origin=Origin.PREDICTED,
        reason="price of the machine over its measured request rate at full load",
    )


def _cost(price_usd_per_hour: float, rate: Interval) -> Interval:
    return Interval(lower=_usd_per_1k(price_usd_per_hour, rate.upper), upper=_usd_per_1k(price_usd_per_hour, rate.lower))


def _usd_per_1k(price_usd_per_hour: float, requests_per_s: float) -> float:
    return price_usd_per_hour / 3600 / requests_per_s * 1000
