"""How many KV pages an engine gets: from what is free, what is promised, and what requests look like."""

from dataclasses import dataclass

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.target import ModelFacts
from model_optimizer.errors import UnsupportedError
from model_optimizer.memory.budget import (
    PROCESS_BYTES,
    RUNTIME_CONTEXT_BYTES,
    Budget,
    activation_bytes,
    binary_size,
    pages_for,
    request_tokens,
)
from model_optimizer.memory.config import MemoryConfig
from model_optimizer.memory.kv_layout import KvLayout
from model_optimizer.spec import Sla, Traffic

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Available:
    """What the plan may count on: free memory of the device, and what the weights take of it."""

    free_bytes: int
    weight_bytes: int
    workspace_bytes: int = 0
    context_bytes: int = RUNTIME_CONTEXT_BYTES
    process_bytes: int = PROCESS_BYTES

    @property
    def beside_bytes(self) -> int:
        """Return what is taken beside weights, cache and activations."""
        return self.workspace_bytes + self.context_bytes + self.process_bytes

    def budget(self, kv_bytes: int, activation_bytes: int, usable_bytes: int) -> Budget:
        return Budget(
            weight_bytes=self.weight_bytes,
            kv_bytes=kv_bytes,
            activation_bytes=activation_bytes,
            usable_bytes=usable_bytes,
            workspace_bytes=self.workspace_bytes,
            context_bytes=self.context_bytes,
            process_bytes=self.process_bytes,
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """What the profile asks of the plan."""

    sla: Sla
    traffic: Traffic
    config: MemoryConfig


def usable_bytes(available: Available, demand: Demand) -> int:
    """Return utilisation ratio x free bytes, or `sla.memory_gib` where that is less: all that the process may hold (X17)."""
    usable = int(demand.config.utilization_ratio * available.free_bytes)
    if demand.sla.memory_gib is not None:
        usable = min(usable, int(demand.sla.memory_gib * GIB))
    return usable


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a plan must know of the model's cache."""

    bytes_per_token: int
    max_position: int
    scale_bytes_per_page: int = 0
    precision: str = "float32"

    @classmethod
    def of(cls, facts: ModelFacts, config: MemoryConfig) -> "CacheShape":
        """Return the cache as the facts state it, or in the precision that the profile states."""
        if config.kv_precision == "auto":
            return cls(facts.kv_bytes_per_token, facts.max_position)
        return cls.from_layout(KvLayout.of(facts, config.page_tokens, config.kv_precision), facts.max_position)

    @classmethod
    def from_layout(cls, layout: KvLayout, max_position: int) -> "CacheShape":
        return cls(layout.bytes_per_token, max_position, layout.scale_bytes_per_page, layout.precision)


def make_kv_plan(facts: ModelFacts, demand: Demand, available: Available) -> tuple[KvPlan, Budget]:
    """Return as many pages as fit, at most `concurrency x max_model_len`, and the budget that they lead to.

    What fits is usable memory less the breathing room, weights, activations, workspace and runtime context.

    Raises:
        UnsupportedError: not even one request of the traffic's p95 length fits; says what would help.
    """
    prompt = min(demand.traffic.prompt_tokens.p95, demand.sla.max_model_len, facts.max_position)
    working = activation_bytes(facts, prompt, demand.sla.concurrency)
    return fit_pages(CacheShape.of(facts, demand.config), working, demand, available)


def fit_pages(cache: CacheShape, working_bytes: int, demand: Demand, available: Available) -> tuple[KvPlan, Budget]:
    """Return as many pages as fit beside `working_bytes` of activations and everything else, and the budget.

    Raises:
        UnsupportedError: not even one request of the traffic's p95 length fits; says what would help.
    """
    sla, config = demand.sla, demand.config
    max_model_len = min(sla.max_model_len, cache.max_position)
    long_request = min(request_tokens(demand.traffic, sla), max_model_len)
    page_bytes = config.page_tokens * cache.bytes_per_token + cache.scale_bytes_per_page
    usable = usable_bytes(available, demand)
    fixed = available.weight_bytes + working_bytes + available.beside_bytes
    room = int((1 - config.breathing_room_ratio) * usable) - fixed
    wanted = sla.concurrency * pages_for(max_model_len, config.page_tokens)
    num_pages = min(wanted, max(0, room) // page_bytes)
    pages_per_request = pages_for(long_request, config.page_tokens)
    if num_pages < pages_per_request:
        raise UnsupportedError(
            f"no request fits: one of {long_request} tokens needs {binary_size(pages_per_request * page_bytes)} of KV cache, "
            f"but of {binary_size(usable)} usable {binary_size(max(0, room))} are left beside {binary_size(fixed)} for weights, "
            f"activations and runtime; free memory, raise sla.memory_gib, shorten the traffic's lengths, or scan fewer bits"
        )
    plan = KvPlan(
        page_tokens=config.page_tokens,
        num_pages=num_pages,
        bytes_per_token=cache.bytes_per_token,
        max_batch=min(sla.concurrency, num_pages // pages_per_request),
        max_model_len=min(max_model_len, num_pages * config.page_tokens),
        precision=cache.precision,
        scale_bytes_per_page=cache.scale_bytes_per_page,
    )
    return plan, available.budget(plan.pool_bytes, working_bytes, usable)


def capacity_requests(plan: KvPlan, tokens_per_request: int) -> int:
    """Return how many requests of that many tokens fit into the plan's pages at once."""
    return plan.num_pages // pages_for(tokens_per_request, plan.page_tokens)


def default_kv_plan(facts: ModelFacts, sla: Sla, page_tokens: int = 16) -> KvPlan:
    """Return the plan for opening an engine before memory is planned: every stream at its full length."""
    max_model_len = min(sla.max_model_len, facts.max_position)
    return KvPlan(
        page_tokens=page_tokens,
        num_pages=sla.concurrency * pages_for(max_model_len, page_tokens),
        bytes_per_token=facts.kv_bytes_per_token,
        max_batch=sla.concurrency,
        max_model_len=max_model_len,
    )
