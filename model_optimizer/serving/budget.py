"""The memory table of an engine that is loaded: its weights and process are measured, its cache is the plan's, the rest is told
from config.json.

Knows neither torch nor transformers. `model-optimizer memory` says more: what would help, and how running out shows.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from pydantic import ValidationError

from model_optimizer.memory.budget import (
    CUDA_CONTEXT_BYTES,
    RUNTIME_CONTEXT_BYTES,
    Budget,
    activation_bytes,
    request_tokens,
    workspace_bytes,
)
from model_optimizer.memory.kv_layout import VALUE_BYTES, KvLayerShape, KvLayout
from model_optimizer.memory.plan import capacity_requests
from model_optimizer.memory.table import CHUNK_TOKENS, CHUNKING_RUNTIMES, MemoryTable
from model_optimizer.models.shape import ALIASES
from model_optimizer.serving.source import Source
from model_optimizer.serving.wire import Ready
from model_optimizer.spec import Lengths, Sla, Traffic

_USABLE_RATIO = 0.9
"""Share of free memory that an engine may use. Source: `MemoryConfig.utilization_ratio`."""


@dataclass(frozen=True, slots=True)
class _Dimensions:
    """Of a decoder, as far as config.json states them; 0 where it does not."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def kv_layer(self) -> KvLayerShape:
        return KvLayerShape(self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def attention(self) -> str:
        kind = "MHA" if self.num_kv_heads == self.num_heads else "MQA" if self.num_kv_heads == 1 else "GQA"
        return f"{kind}: {self.num_layers} layers"


def loaded_table(source: Source, ready: Ready, process_bytes: int) -> MemoryTable:
    """Return where an engine's bytes go and how many requests fit; `process_bytes` is its resident size."""
    plan, dimensions = source.kv, _dimensions(source.model)
    sla = Sla(concurrency=plan.max_batch, max_model_len=max(16, plan.max_model_len))
    traffic = _traffic(source.model.parent) or _longest(sla)
    prompt = min(traffic.prompt_tokens.p95, plan.max_model_len)
    if source.engine.runtime in CHUNKING_RUNTIMES:
        prompt = min(prompt, CHUNK_TOKENS)
    on_gpu = ready.device.startswith("cuda")
    held = ready.weight_bytes + ready.pool_bytes
    context = CUDA_CONTEXT_BYTES if on_gpu else RUNTIME_CONTEXT_BYTES
    free = _gpu_free_bytes() + held + context if on_gpu else psutil.virtual_memory().available + process_bytes
    compute = ready.precision if ready.precision in VALUE_BYTES else "float32"
    layout = KvLayout((dimensions.kv_layer,), plan.page_tokens, plan.precision, compute)
    tokens = request_tokens(traffic, sla)
    budget = Budget(
        weight_bytes=ready.weight_bytes,
        kv_bytes=plan.pool_bytes,
        activation_bytes=activation_bytes(dimensions, prompt, plan.max_batch),
        usable_bytes=int(_USABLE_RATIO * free),
        workspace_bytes=workspace_bytes(layout, plan.max_batch * tokens),
        context_bytes=context,
        process_bytes=0 if on_gpu else max(0, process_bytes - held),
    )
    wanted = budget.engine_bytes + budget.process_bytes
    return MemoryTable(
        model=source.name,
        attention=dimensions.attention,
        device=ready.device,
        runtime=source.engine.runtime,
        kv=plan,
        kv_note=f"{plan.num_pages} pages of {plan.page_tokens} tokens in {plan.precision}; {source.kv_origin}",
        budget=budget.lines(),
        usable_bytes=budget.usable_bytes,
        wanted_bytes=wanted,
        fits=wanted <= budget.usable_bytes,
        runs=capacity_requests(plan, tokens) > 0,
        tokens_per_request=tokens,
        capacity_requests=capacity_requests(plan, tokens),
        capacity_typical_requests=capacity_requests(plan, _typical(traffic, sla)),
        capacity_full_requests=capacity_requests(plan, sla.max_model_len),
        options=(),
        symptoms=(),
    )


def _dimensions(model: Path) -> _Dimensions:
    stated = json.loads((model / "config.json").read_bytes())

    def number(name: str) -> int:
        values = (stated.get(alias) for alias in (*ALIASES.get(name, ()), name))
        return next((value for value in values if isinstance(value, int) and value > 0), 0)

    heads, hidden = number("num_heads"), number("hidden_size")
    return _Dimensions(
        num_layers=number("num_layers"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size") or 4 * hidden,
        num_heads=heads,
        num_kv_heads=number("num_kv_heads") or heads,
        head_dim=number("head_dim") or hidden // max(1, heads),
        vocab_size=number("vocab_size"),
    )


def _traffic(bundle: Path) -> Traffic | None:
    """Return what a bundle's config.yaml says that requests look like; None where it does not."""
    path = bundle / "config.yaml"
    if not path.is_file():
        return None
    try:
        stated = yaml.safe_load(path.read_bytes())
        return Traffic.model_validate(stated["traffic"])
    except (yaml.YAMLError, ValidationError, LookupError, TypeError):
        return None


def _longest(sla: Sla) -> Traffic:
    """Return traffic of nothing but longest requests: what must be planned for where nothing is known."""
    half = sla.max_model_len // 2
    rest = sla.max_model_len - half
    return Traffic(prompt_tokens=Lengths(p50=half, p95=half, max=half), output_tokens=Lengths(p50=rest, p95=rest, max=rest))


def _typical(traffic: Traffic, sla: Sla) -> int:
    return min(traffic.prompt_tokens.p50 + traffic.output_tokens.p50, sla.max_model_len)


def _gpu_free_bytes() -> int:
    """Return the free memory of the first GPU; 0 where the driver does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
