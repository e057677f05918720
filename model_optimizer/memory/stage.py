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
from model_optimizer.memory.config import MemoryConfig
from model_optimizer.memory.plan import Available, Demand, capacity_requests, make_kv_plan
from model_optimizer.protocols import LogitsRuntime, Progress
from model_optimizer.spec import Sla, Traffic
from model_optimizer.store import file_refs, write_atomically

CONFIG_FILE = "kv_cache_config.json"


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
        UnsupportedError: not even one request fits.
    """
    facts, demand = inputs.target.artifact.model, Demand(inputs.sla, inputs.traffic, inputs.config)
    engine = inputs.engine.artifact.engine
    weight_bytes = resident_weight_bytes(engine.runtime, facts, engine.num_bytes)
    plan, budget = make_kv_plan(facts, demand, Available(inputs.target.artifact.device.memory_free_bytes, weight_bytes))
    write_atomically(workspace / CONFIG_FILE, json.dumps(config_document(plan, facts), indent=2).encode())
    progress.note(f"KV plan: {plan.num_pages} pages of {plan.page_tokens} tokens, {binary_size(budget.kv_bytes)}")
    result = check(plan, demand, facts.vocab_size, open_runtime, progress)
    predicted = predicted_check_bytes(facts, demand, plan, weight_bytes)
    account = Account(facts, demand, plan, budget, result, predicted)
    return MemoryPlan(
        files=file_refs(workspace, workspace / CONFIG_FILE),
        measures=measures(account),
        decisions=decisions(account),
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


def predicted_check_bytes(facts: ModelFacts, demand: Demand, plan: KvPlan, weight_bytes: int) -> int:
    """Return the peak that the check is predicted to add to the process.

    Weights, twice the KV cache of the planned requests (a step writes the grown cache before it frees the old one),
    activations and runtime context.
    """
    tokens = min(request_tokens(demand.traffic, demand.sla), plan.max_model_len)
    kv = plan.max_batch * pages_for(tokens, plan.page_tokens) * plan.page_tokens * plan.bytes_per_token
    prompt = min(demand.traffic.prompt_tokens.p95, plan.max_model_len)
    return weight_bytes + 2 * kv + activation_bytes(facts, prompt, plan.max_batch) + RUNTIME_CONTEXT_BYTES
