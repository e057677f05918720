"""Stage memory: plan the KV cache, then really run the planned concurrency and compare with the prediction.

Knows no runtime; the caller passes in how to open the engine.
"""

import json
from collections.abc import Callable
from pathlib import Path

from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.memory import KvPlan, MemoryPlan
from model_optimizer.artifacts.target import ModelFacts, TargetProfile
from model_optimizer.decisions import Decision
from model_optimizer.errors import UnsupportedError
from model_optimizer.memory.account import Account, config_document, decisions, measures, warnings
from model_optimizer.memory.budget import (
    RUNTIME_CONTEXT_BYTES,
    activation_bytes,
    binary_size,
    pages_for,
    request_tokens,
    resident_weight_bytes,
)
from model_optimizer.memory.check import check
from model_optimizer.memory.config import AUTO_PAGE_TOKENS, MemoryConfig
from model_optimizer.memory.kv_layout import KvLayout
from model_optimizer.memory.plan import Available, Demand, capacity_requests, make_kv_plan
from model_optimizer.protocols import LogitsRuntime, Progress
from model_optimizer.spec import Sla, Traffic
from model_optimizer.store import file_refs, write_atomically

CONFIG_FILE = "kv_cache_config.json"
PAGE_SIZES_FILE = "page_sizes.json"
"""Figures behind `page_tokens: auto`; a call that was killed has them from before."""
PAGED_RUNTIMES = frozenset({"torch"})
"""Runtimes that keep their cache in a `KvStorage`."""


class MemoryInputs(StageInputs):
    """What the memory stage reads."""

    engine: Stored[CompiledModel]
    target: Stored[TargetProfile]
    sla: Sla
    traffic: Traffic
    config: MemoryConfig
    model: Tree


def plan_memory(
    inputs: MemoryInputs, workspace: Path, *, open_runtime: Callable[[KvPlan], LogitsRuntime], progress: Progress
) -> MemoryPlan:
    """Write the KV plan, run as many p95 requests at once as it promises, and report predicted against measured bytes.

    Raises:
        UnsupportedError: not even one request fits, or the runtime cannot keep its cache in the stated precision.
    """
    facts, engine = inputs.target.artifact.model, inputs.engine.artifact.engine
    _require_paged(inputs.config, engine.runtime)
    config, sized = _with_page_tokens(inputs, workspace, progress)
    demand = Demand(inputs.sla, inputs.traffic, config)
    weight_bytes = resident_weight_bytes(engine.runtime, facts, engine.num_bytes)
    plan, budget = make_kv_plan(facts, demand, Available(inputs.target.artifact.device.memory_free_bytes, weight_bytes))
    write_atomically(workspace / CONFIG_FILE, json.dumps(config_document(plan, facts), indent=2).encode())
    progress.note(f"KV plan: {plan.num_pages} pages of {plan.page_tokens} tokens, {binary_size(budget.kv_bytes)}")
    result = check(plan, demand, facts.vocab_size, open_runtime, progress)
    predicted = predicted_check_bytes(facts, demand, plan, weight_bytes)
    account = Account(facts, demand, plan, budget, result, predicted)
    return MemoryPlan(
        files=file_refs(workspace, workspace / CONFIG_FILE, *workspace.glob(PAGE_SIZES_FILE)),
        measures=measures(account),
        decisions=decisions(account) + sized,
        warnings=warnings(account),
        kv=plan,
        budget=budget.lines(),
        planned_concurrency=plan.max_batch,
        capacity_requests=capacity_requests(plan, result.tokens_per_request),
        ran_concurrency=result.ran_concurrency,
        predicted_peak_bytes=predicted,
        measured_peak_bytes=result.peak_bytes,
        config=CONFIG_FILE,
    )


def _require_paged(config: MemoryConfig, runtime: str) -> None:
    """Refuse a KV precision that the engine's runtime would ignore."""
    if config.kv_precision != "auto" and runtime not in PAGED_RUNTIMES:
        raise UnsupportedError(
            f"memory.kv_precision {config.kv_precision}: {runtime} keeps its cache as it was compiled; only "
            f"{', '.join(sorted(PAGED_RUNTIMES))} stores it in another precision; "
            "set memory.kv_precision: auto, or scan.runtimes: [torch]"
        )


def _with_page_tokens(inputs: MemoryInputs, workspace: Path, progress: Progress) -> tuple[MemoryConfig, tuple[Decision, ...]]:
    """Return the settings with a page size, and how it was found where the profile says `auto`."""
    config = inputs.config
    if config.page_tokens != AUTO_PAGE_TOKENS:
        return config, ()
    from model_optimizer.memory.page_size import CANDIDATES, cached_page_sizes, choose_page_tokens, typical_tokens

    target = inputs.target.artifact
    precision = "float32" if config.kv_precision == "auto" else config.kv_precision
    layout = KvLayout.of(target.model, CANDIDATES[0], precision)
    figures = cached_page_sizes(workspace / PAGE_SIZES_FILE, layout, typical_tokens(inputs.traffic), target.device.kind)
    decision = choose_page_tokens(figures)
    progress.note(decision.sentence())
    return config.model_copy(update={"page_tokens": int(decision.numbers["page_tokens"])}), (decision,)


def predicted_check_bytes(facts: ModelFacts, demand: Demand, plan: KvPlan, weight_bytes: int) -> int:
    """Return the peak that the check is predicted to add to the process.

    Weights, twice the KV cache of the planned requests (a step writes the grown cache before it frees the old one),
    activations and runtime context.
    """
    tokens = min(request_tokens(demand.traffic, demand.sla), plan.max_model_len)
    kv = plan.max_batch * pages_for(tokens, plan.page_tokens) * plan.page_tokens * plan.bytes_per_token
    prompt = min(demand.traffic.prompt_tokens.p95, plan.max_model_len)
    return weight_bytes + 2 * kv + activation_bytes(facts, prompt, plan.max_batch) + RUNTIME_CONTEXT_BYTES
