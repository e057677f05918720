"""The proof of a KV plan: as many long requests at once as it promises, with the process's memory watched."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.measurement.process import PeakSampler, quiesced_rss_bytes
from model_optimizer.memory.budget import request_tokens
from model_optimizer.memory.plan import Demand
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, Progress

TIME_LIMIT_S = 40.0
"""After it the remaining tokens are given up and the result says so."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What the check saw; bytes are what opening and running added to the process."""

    ran_concurrency: int
    tokens_per_request: int
    tokens_reached: int
    """Longest request when the check ended, prompt included; less than `tokens_per_request` where time ran out."""
    weight_bytes: int
    """As the runtime reports them."""
    open_bytes: int
    """Growth of the process by opening the engine."""
    peak_bytes: int
    """Largest growth of the process, from before opening."""
    peak_kv_bytes: int
    process_peak_bytes: int
    """Largest size of the whole process, whatever else it holds."""
    wall_s: float


def check(
    plan: KvPlan, demand: Demand, vocab_size: int, open_runtime: Callable[[KvPlan], LogitsRuntime], progress: Progress
) -> CheckResult:
    """Open the engine, run `plan.max_batch` requests of p95 prompt and p95 output together, and close it.

    Prompts are seeded random tokens: memory does not depend on their meaning.
    """
    total = min(request_tokens(demand.traffic, demand.sla), plan.max_model_len)
    num_output = max(1, min(demand.traffic.output_tokens.p95, total - 1))
    requests = _requests(plan.max_batch, total - num_output, num_output, vocab_size)
    before = quiesced_rss_bytes()
    start = time.monotonic()
    with PeakSampler(interval_s=0.005) as sampler:
        runtime = open_runtime(plan)
        try:
            opened = quiesced_rss_bytes()
            run = _run(runtime, requests, start + TIME_LIMIT_S, progress)
            weight_bytes = runtime.memory().weight_bytes
        finally:
            runtime.close()
    return CheckResult(
        ran_concurrency=run.most_running,
        tokens_per_request=total,
        tokens_reached=total - num_output + run.most_tokens,
        weight_bytes=weight_bytes,
        open_bytes=opened - before,
        peak_bytes=sampler.peak_bytes - before,
        peak_kv_bytes=run.peak_kv_bytes,
        process_peak_bytes=sampler.peak_bytes,
        wall_s=time.monotonic() - start,
    )


def _requests(num: int, prompt_tokens: int, output_tokens: int, vocab_size: int) -> list[GenerationRequest]:
    generator = np.random.default_rng(0)
    prompts = generator.integers(0, vocab_size, size=(num, prompt_tokens)).tolist()
    return [GenerationRequest(prompt=tuple(prompt), max_new_tokens=output_tokens) for prompt in prompts]


@dataclass(slots=True)
class _Run:
    most_running: int = 0
    most_tokens: int = 0
    peak_kv_bytes: int = 0


def _run(runtime: LogitsRuntime, requests: list[GenerationRequest], deadline: float, progress: Progress) -> _Run:
    """Decode all requests together until they finish or time is up; count how many produced tokens in one step."""
    waiting = {runtime.submit(request) for request in requests}
    done: dict[int, int] = dict.fromkeys(waiting, 0)
    run = _Run()
    for _ in progress.track(range(requests[0].max_new_tokens + len(requests)), "memory check"):
        events = runtime.step()
        run.most_running = max(run.most_running, len({event.request for event in events}))
        run.peak_kv_bytes = max(run.peak_kv_bytes, runtime.memory().kv_bytes)
        for event in events:
            done[event.request] += 1
            run.most_tokens = max(run.most_tokens, done[event.request])
            if event.finished:
                waiting.discard(event.request)
        if not waiting or time.monotonic() > deadline:
            break
    for request in waiting:
        runtime.cancel(request)
    return run
