"""What the memory stage says of its plan and its check: measures, decisions, warnings, and the engine's config file."""

from dataclasses import dataclass

from model_optimizer.artifacts.measure import Dimension, Measure, Origin, Verdict
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.target import ModelFacts
from model_optimizer.decisions import Decision
from model_optimizer.memory.budget import Budget, binary_size
from model_optimizer.memory.check import CheckResult
from model_optimizer.memory.plan import GIB, Demand, capacity_requests

TOLERATED_RATIO = 1.25
"""Prediction and measurement further apart than this are reported as a doubt, either way."""


@dataclass(frozen=True, slots=True)
class Account:
    """A plan, the numbers that it came from, and what the check saw."""

    facts: ModelFacts
    demand: Demand
    plan: KvPlan
    budget: Budget
    result: CheckResult
    predicted_bytes: int

    @property
    def occupancy_ratio(self) -> float:
        """Return the share of the reservation that the check's requests really filled at their peak."""
        return min(1.0, self.result.peak_kv_bytes / self.plan.pool_bytes)


def config_document(plan: KvPlan, facts: ModelFacts) -> dict[str, int | str | list[dict[str, int | str | None]]]:
    """Return the content of kv_cache_config.json, read back by serving and by the native runtime.

    `num_pages` pages of `page_tokens` tokens; `bytes_per_token` over all layers, which `layers` breaks down;
    `max_batch` requests at once, none longer than `max_model_len` tokens with what it generates.
    """
    layers: list[dict[str, int | str | None]] = [layer.model_dump() for layer in facts.kv]
    return {
        "kv_cache_format": 1,
        "precision": plan.precision,
        "page_tokens": plan.page_tokens,
        "num_pages": plan.num_pages,
        "bytes_per_token": plan.bytes_per_token,
        "capacity_tokens": plan.capacity_tokens,
        "scale_bytes_per_page": plan.scale_bytes_per_page,
        "pool_bytes": plan.pool_bytes,
        "max_batch": plan.max_batch,
        "max_model_len": plan.max_model_len,
        "layers": layers,
    }


def measures(account: Account) -> tuple[Measure, ...]:
    """Return the resource figures of the stage; the process is gated by `sla.memory_gib` where that is set."""
    plan, result = account.plan, account.result

    def resource(name: str, unit: str, value: float, reason: str = "", origin: Origin = Origin.MEASURED) -> Measure:
        return Measure(name=name, dimension=Dimension.RESOURCE, unit=unit, value=value, reason=reason, origin=origin)

    seen = f"{result.ran_concurrency} requests of {result.tokens_reached} tokens together"
    reached = capacity_requests(plan, result.tokens_per_request)
    predicted = account.predicted_bytes / result.peak_bytes if result.peak_bytes > 0 else None
    return (
        _process(account),
        resource("engine_peak", "bytes", result.peak_bytes, f"growth of the process from before opening, {seen}"),
        resource("engine_peak_predicted", "bytes", account.predicted_bytes, "for the same requests", Origin.PREDICTED),
        Measure(
            name="memory_prediction",
            dimension=Dimension.RESOURCE,
            unit="ratio",
            value=predicted,
            origin=Origin.MEASURED if predicted else Origin.NOT_MEASURED,
            reason="predicted over measured engine peak" if predicted else "the process did not grow; its memory was reused",
        ),
        resource("weights_resident", "bytes", result.weight_bytes, "as the runtime reports them"),
        resource("kv_pool", "bytes", plan.pool_bytes, "all pages of the plan", Origin.PREDICTED),
        resource("kv_peak", "bytes", result.peak_kv_bytes, f"in use, {seen}"),
        resource("kv_occupancy", "ratio", account.occupancy_ratio, "peak use over the pool"),
        resource("ran_concurrency", "count", result.ran_concurrency, f"planned {plan.max_batch}"),
        resource("capacity_requests", "count", reached, f"of {result.tokens_per_request} tokens", Origin.PREDICTED),
    )


def _process(account: Account) -> Measure:
    """Return the whole process's peak against the limit.

    The process that measures also holds the pipeline, so it is an upper bound: below the limit accepts, an engine
    that alone exceeds the limit rejects, anything between is inconclusive.
    """
    peak, limit_gib = account.result.process_peak_bytes, account.demand.sla.memory_gib
    limit = None if limit_gib is None else limit_gib * GIB
    verdict = None
    if limit is not None:
        above = Verdict.REJECT if account.result.peak_bytes > limit else Verdict.INCONCLUSIVE
        verdict = Verdict.ACCEPT if peak <= limit else above
    return Measure(
        name="process_peak",
        dimension=Dimension.RESOURCE,
        unit="bytes",
        value=peak,
        limit=limit,
        verdict=verdict,
        reason="upper bound: the measuring process holds the pipeline too",
    )


def decisions(account: Account) -> tuple[Decision, ...]:
    """Say where the number of pages, the concurrency and the longest request come from."""
    plan, sla = account.plan, account.demand.sla
    wanted = sla.concurrency * min(sla.max_model_len, account.facts.max_position)
    bound = (
        "that is concurrency x max_model_len, all that can be used" if plan.capacity_tokens >= wanted else "memory holds no more"
    )
    pages = Decision(
        subject="KV pages",
        choice=f"{plan.num_pages} pages of {plan.page_tokens} tokens ({binary_size(account.budget.kv_bytes)})",
        because=bound,
        numbers={
            "capacity_tokens": plan.capacity_tokens,
            "wanted_tokens": wanted,
            "bytes_per_token": plan.bytes_per_token,
            "usable_bytes": account.budget.usable_bytes,
        },
    )
    fits = capacity_requests(plan, account.result.tokens_per_request)
    batch = Decision(
        subject="concurrency",
        choice=f"{plan.max_batch} requests at once",
        because="the service level asks for that many" if plan.max_batch == sla.concurrency else "no more p95 requests fit",
        numbers={"asked": sla.concurrency, "fit": fits, "ran": account.result.ran_concurrency},
    )
    longest = account.demand.traffic.prompt_tokens.max + account.demand.traffic.output_tokens.max
    length = Decision(
        subject="longest request",
        choice=f"{plan.max_model_len} tokens",
        because=_length_reason(account, longest),
        numbers={"traffic_max_tokens": longest, "model_max_tokens": account.facts.max_position},
    )
    return (pages, batch, length)


def _length_reason(account: Account, longest: int) -> str:
    if account.plan.max_model_len < min(account.demand.sla.max_model_len, account.facts.max_position):
        return "no longer one fits into the pages"
    if account.facts.max_position < account.demand.sla.max_model_len:
        return "the model was trained for no more"
    if longest < account.plan.max_model_len:
        return "the service level asks for it, though the stated traffic stays shorter"
    return "the service level asks for it"


def warnings(account: Account) -> tuple[str, ...]:
    """Return every doubt that the report must show."""
    plan, result, sla = account.plan, account.result, account.demand.sla
    found = []
    if plan.max_batch < sla.concurrency:
        found.append(f"memory holds {plan.max_batch} p95 requests at once; the service level asks for {sla.concurrency}")
    if result.ran_concurrency < plan.max_batch:
        found.append(f"{result.ran_concurrency} requests ran at once where {plan.max_batch} were planned")
    if result.tokens_reached < result.tokens_per_request:
        found.append(
            f"the check stopped after {result.wall_s:.0f} s at {result.tokens_reached} of {result.tokens_per_request} tokens"
        )
    if result.peak_bytes > 0:
        ratio = account.predicted_bytes / result.peak_bytes
        if not 1 / TOLERATED_RATIO <= ratio <= TOLERATED_RATIO:
            found.append(
                f"predicted engine peak {binary_size(account.predicted_bytes)} against measured {binary_size(result.peak_bytes)} "
                f"(ratio {ratio:.2f})"
            )
    return tuple(found)
