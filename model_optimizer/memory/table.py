"""The budget of one model on one device: where the bytes go, what fits, what would help, and how running out shows.

Pure arithmetic over a `Subject` and what is asked of it; nothing is loaded.
"""

from dataclasses import dataclass, replace

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.target import BudgetLine
from model_optimizer.decisions import Decision
from model_optimizer.errors import UnsupportedError
from model_optimizer.memory.budget import (
    UNPACKING_RUNTIMES,
    Budget,
    activation_bytes,
    binary_size,
    pages_for,
    request_tokens,
    unpacking_bytes,
    workspace_bytes,
)
from model_optimizer.memory.kv_layout import SCALED, VALUE_BYTES, KvLayout
from model_optimizer.memory.plan import Available, CacheShape, Demand, capacity_requests, fit_pages, usable_bytes
from model_optimizer.memory.subject import Subject
from model_optimizer.memory.symptoms import Symptom, symptoms

CHUNK_TOKENS = 512
"""Prompt tokens of one step of a runtime that cuts prompts. Source: `NativeOptions.max_prefill_tokens`."""
CHUNKING_RUNTIMES = frozenset({"torch", "vllm"})


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory that an engine may count on, and what is gone before its first tensor."""

    name: str
    free_bytes: int
    context_bytes: int
    process_bytes: int
    dtype: str
    """What weights and activations run in."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a budget is made for; `demand.config.page_tokens` is a number here."""

    demand: Demand
    device: DeviceMemory
    runtime: str = "torch"
    bits: float | None = None
    """Of linear weights; None = as they are stored."""
    packed: bool = False
    """Whether a runtime that could unpack weights at load keeps them packed."""
    windowed: bool = False
    """Whether sliding layers drop pages behind their window."""

    @property
    def kv_precision(self) -> str:
        stated = self.demand.config.kv_precision
        return self.device.dtype if stated == "auto" else stated


class Option(Frozen):
    """One thing that would save memory."""

    change: str
    saved_bytes: int
    fits_then: bool
    """Whether it alone makes everything fit that is asked for."""
    price: str


class MemoryTable(Frozen):
    """What `model-optimizer memory` says."""

    model: str
    attention: str
    device: str
    runtime: str
    kv: KvPlan
    kv_note: str
    budget: tuple[BudgetLine, ...]
    usable_bytes: int
    wanted_bytes: int
    """For every stream at its full length, breathing room aside."""
    fits: bool
    """Whether everything that is asked for fits, with the breathing room."""
    runs: bool
    """Whether at least one p95 request fits."""
    tokens_per_request: int
    capacity_requests: int
    """Requests of that length at once."""
    capacity_typical_requests: int
    """Requests of the median prompt and output at once."""
    capacity_full_requests: int
    """Requests of the longest length at once."""
    options: tuple[Option, ...]
    symptoms: tuple[Symptom, ...]
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True)
class _Parts:
    """Bytes of everything that is asked for."""

    available: Available
    activation_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.available.weight_bytes + self.available.beside_bytes + self.activation_bytes + self.kv_bytes


def memory_table(subject: Subject, asked: Asked) -> MemoryTable:
    """Return the budget, how many requests fit, what would help most in order, and the symptoms to look for."""
    demand, layout = asked.demand, _layout(subject, asked)
    parts = _parts(subject, asked)
    limit = _limit_bytes(parts, demand)
    cache = CacheShape.from_layout(layout, subject.shape.max_position)
    try:
        plan, budget = fit_pages(cache, parts.activation_bytes, demand, parts.available)
        runs = True
    except UnsupportedError:
        plan, budget = _one_request(cache, parts, demand)
        runs = False
    tokens = _long_request(subject, demand)
    return MemoryTable(
        model=subject.name,
        attention=_described(subject),
        device=asked.device.name,
        runtime=asked.runtime,
        kv=plan,
        kv_note=f"{plan.num_pages} pages of {plan.page_tokens} tokens in {plan.precision}",
        budget=budget.lines(),
        usable_bytes=budget.usable_bytes,
        wanted_bytes=parts.total_bytes,
        fits=parts.total_bytes <= limit,
        runs=runs,
        tokens_per_request=tokens,
        capacity_requests=capacity_requests(plan, tokens) if runs else 0,
        capacity_typical_requests=capacity_requests(plan, _typical(subject, demand)) if runs else 0,
        capacity_full_requests=capacity_requests(plan, _longest(subject, demand)) if runs else 0,
        options=_options(subject, asked, parts),
        symptoms=symptoms(
            subject, asked.runtime, asked.device.dtype, budget, subject.packed_bytes(asked.bits, asked.device.dtype)
        ),
    )


def _longest(subject: Subject, demand: Demand) -> int:
    return min(demand.sla.max_model_len, subject.shape.max_position or demand.sla.max_model_len)


def _long_request(subject: Subject, demand: Demand) -> int:
    return min(request_tokens(demand.traffic, demand.sla), _longest(subject, demand))


def _typical(subject: Subject, demand: Demand) -> int:
    return min(demand.traffic.prompt_tokens.p50 + demand.traffic.output_tokens.p50, _longest(subject, demand))


def _layout(subject: Subject, asked: Asked) -> KvLayout:
    return subject.geometry.layout(asked.demand.config.page_tokens, asked.kv_precision, asked.device.dtype)


def _parts(subject: Subject, asked: Asked) -> _Parts:
    demand, device = asked.demand, asked.device
    longest, page_tokens = _longest(subject, demand), demand.config.page_tokens
    prompt = min(demand.traffic.prompt_tokens.p95, longest)
    if asked.runtime in CHUNKING_RUNTIMES:
        prompt = min(prompt, CHUNK_TOKENS)
    kv_of = subject.geometry.windowed_request_bytes if asked.windowed else subject.geometry.request_bytes
    gathered = workspace_bytes(_layout(subject, asked), demand.sla.concurrency * _long_request(subject, demand))
    unpacked = unpacking_bytes(subject.shape) if asked.packed and asked.runtime in UNPACKING_RUNTIMES else 0
    return _Parts(
        available=Available(
            free_bytes=device.free_bytes,
            weight_bytes=subject.resident_bytes(asked.runtime, asked.bits, device.dtype, packed=asked.packed),
            workspace_bytes=max(gathered, unpacked),
            context_bytes=device.context_bytes,
            process_bytes=device.process_bytes,
        ),
        activation_bytes=activation_bytes(subject.shape, prompt, demand.sla.concurrency, VALUE_BYTES[device.dtype]),
        kv_bytes=demand.sla.concurrency * kv_of(longest, page_tokens, asked.kv_precision),
    )


def _limit_bytes(parts: _Parts, demand: Demand) -> int:
    return int((1 - demand.config.breathing_room_ratio) * usable_bytes(parts.available, demand))


def _one_request(cache: CacheShape, parts: _Parts, demand: Demand) -> tuple[KvPlan, Budget]:
    """Return the least plan, one p95 request, for a table that shows by how much it does not fit."""
    tokens = min(request_tokens(demand.traffic, demand.sla), cache.max_position or demand.sla.max_model_len)
    pages = pages_for(tokens, demand.config.page_tokens)
    plan = KvPlan(
        page_tokens=demand.config.page_tokens,
        num_pages=pages,
        bytes_per_token=cache.bytes_per_token,
        max_batch=1,
        max_model_len=tokens,
        precision=cache.precision,
        scale_bytes_per_page=cache.scale_bytes_per_page,
    )
    return plan, parts.available.budget(plan.pool_bytes, parts.activation_bytes, usable_bytes(parts.available, demand))


def _described(subject: Subject) -> str:
    groups = ", ".join(
        f"{it.num_layers} {it.layer_type} layers" + (f" of {it.window} tokens" if it.window else "")
        for it in subject.geometry.groups
    )
    shared = f", {subject.geometry.num_shared_layers} layers share another's cache" if subject.geometry.num_shared_layers else ""
    return f"{subject.geometry.attention}: {groups}{shared}"


def _options(subject: Subject, asked: Asked, parts: _Parts) -> tuple[Option, ...]:
    """Return what saves memory, the most first; each is alone, so two do not simply add up."""
    limit = _limit_bytes(parts, asked.demand)
    found = []
    for change, price, variant in _variants(subject, asked):
        total = _parts(subject, variant).total_bytes
        if total < parts.total_bytes:
            saved = parts.total_bytes - total
            found.append(Option(change=change, saved_bytes=saved, fits_then=total <= limit, price=price))
    return tuple(sorted(found, key=lambda option: -option.saved_bytes))


def _variants(subject: Subject, asked: Asked) -> list[tuple[str, str, Asked]]:
    demand, runtime = asked.demand, asked.runtime
    sla, longest_seen = demand.sla, demand.traffic.prompt_tokens.max + demand.traffic.output_tokens.max
    found = []
    for precision in ("fp8", "int8"):
        if asked.kv_precision not in SCALED:
            config = demand.config.model_copy(update={"kv_precision": precision})
            found.append(
                (
                    f"KV cache in {precision}",
                    "accuracy on long outputs, to be measured",
                    replace(asked, demand=replace(demand, config=config)),
                )
            )
    for bits in (8, 4):
        if asked.bits is None and not subject.quantized:
            kept = replace(asked, bits=float(bits), packed=True)
            found.append((f"linear weights in {bits} bits, kept packed", "accuracy, to be measured", kept))
    if runtime in UNPACKING_RUNTIMES and not asked.packed and (subject.quantized or asked.bits is not None):
        found.append(("keep quantized weights packed", "unpacked again at every use", replace(asked, packed=True)))
    if longest_seen < sla.max_model_len:
        shorter = replace(demand, sla=sla.model_copy(update={"max_model_len": longest_seen}))
        found.append(
            (
                f"max_model_len {longest_seen}, the longest stated request",
                "none within the stated traffic",
                replace(asked, demand=shorter),
            )
        )
    if sla.concurrency > 1:
        fewer = replace(demand, sla=sla.model_copy(update={"concurrency": sla.concurrency // 2}))
        found.append((f"concurrency {sla.concurrency // 2}", "requests wait longer", replace(asked, demand=fewer)))
    if any(group.window is not None for group in subject.geometry.groups) and not asked.windowed:
        found.append(
            (
                "drop pages behind the sliding window",
                "an engine that does so; the native one does where every layer has a window",
                replace(asked, windowed=True),
            )
        )
    if runtime not in CHUNKING_RUNTIMES and demand.traffic.prompt_tokens.p95 > CHUNK_TOKENS:
        found.append((f"prefill in chunks of {CHUNK_TOKENS}", "another runtime", replace(asked, runtime="vllm")))
    return found


def headline(table: MemoryTable) -> str:
    """Return the table's verdict in one line."""
    if not table.runs:
        return f"does not fit: not even one request of {table.tokens_per_request} tokens"
    requests = f"{table.capacity_requests} requests of {table.tokens_per_request} tokens at once"
    requests += f" ({table.capacity_typical_requests} typical, {table.capacity_full_requests} of the longest)"
    if table.fits:
        return f"fits: {requests}"
    return f"fits in part: {requests}; all that is asked for needs {binary_size(table.wanted_bytes)}"
