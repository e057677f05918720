"""The pool's rules applied by a running engine: it grows under load, shrinks after it, and nobody's tokens change."""

from itertools import pairwise
from pathlib import Path

import pytest
from native_fixtures import drain, generate, greedy, kv_plan
from transformers import PreTrainedModel

from model_optimizer.formats.loading import load_dequantized
from model_optimizer.memory.controller import ResizeRules
from model_optimizer.memory.kv_pool import PoolExhausted, PoolMisuse
from model_optimizer.protocols import GenerationRequest
from model_optimizer.runtimes.torch.config import NativeOptions
from model_optimizer.runtimes.torch.engine import NativeRuntime, open_native

RULES = ResizeRules(enabled=True, num_batches=3, hold_s=0, quiet_s=0, scatter_ratio=0.2)
"""Time plays no part."""
MIN_PAGES, MAX_PAGES = 12, 60
PAGE_BYTES = 4 * 2 * 2 * 2 * 16 * 4
"""Tokens x sides x layers x KV heads x head dimension x float32."""
PROMPTS = [tuple(range(start, start + 9)) for start in range(10, 110, 10)]
NUM_NEW = 20


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> PreTrainedModel:
    return load_dequantized(tiny_llama)


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel) -> list[list[int]]:
    return [greedy(reference, prompt, NUM_NEW) for prompt in PROMPTS]


def open_resizing(directory: Path, draft: Path | None = None, rules: ResizeRules = RULES) -> NativeRuntime:
    plan = kv_plan(num_pages=MAX_PAGES, max_batch=10, max_model_len=4 * MIN_PAGES)
    options = NativeOptions(debug=True, initial_pages=MIN_PAGES, resize=rules, draft=draft)
    return open_native(directory, plan, options)


def sizes(runtime: NativeRuntime, num_looks: int) -> list[int]:
    """Look at an idle engine again and again, as a server does; return how many pages there were."""
    seen = []
    for _ in range(num_looks):
        assert runtime.step() == []
        seen.append(runtime.activity().pool.num_pages)
    return seen


def test_pages_grow_by_a_fifth_under_load_and_shrink_by_a_tenth_after_it(tiny_llama: Path, expected: list[list[int]]) -> None:
    runtime = open_resizing(tiny_llama)
    for prompt in PROMPTS:
        runtime.submit(GenerationRequest(prompt, NUM_NEW))
    pages, tokens = [MIN_PAGES], dict[int, list[int]]()
    while events := runtime.step():  # debug: every batch ends with `pool.verify`
        for event in events:
            tokens.setdefault(event.request, []).append(event.token)
        pages.append(runtime.activity().pool.num_pages)
    assert [tokens[number] for number in range(len(PROMPTS))] == expected
    rising = [after for before, after in pairwise(pages) if after > before]
    assert rising[:4] == [15, 18, 22, 27]  # a fifth more each time, rounded up
    assert 30 < max(pages) <= MAX_PAGES
    assert runtime.memory().pool_bytes == runtime.activity().pool.num_pages * PAGE_BYTES
    ebbing = sizes(runtime, 60)
    assert ebbing == sorted(ebbing, reverse=True) and ebbing[-1] == MIN_PAGES
    assert runtime.memory().pool_bytes == MIN_PAGES * PAGE_BYTES
    assert generate(runtime, [GenerationRequest(prompt, NUM_NEW) for prompt in PROMPTS]) == expected


def test_pages_in_use_move_down_when_the_pool_shrinks_under_them(tiny_llama: Path, expected: list[list[int]]) -> None:
    runtime = open_resizing(tiny_llama, draft=tiny_llama, rules=ResizeRules())
    runtime.resize_pool(MAX_PAGES)
    ids = [runtime.submit(GenerationRequest(prompt, NUM_NEW)) for prompt in PROMPTS]
    tokens = {identity: list[int]() for identity in ids}
    for event in runtime.step():
        tokens[event.request].append(event.token)
    for identity in ids[:7]:  # what the last three hold lies at the end
        runtime.cancel(identity)
    with pytest.raises(PoolExhausted, match="8 pages asked for, 9 are in use"):
        runtime.resize_pool(8)
    runtime.resize_pool(24)
    assert runtime.memory().pool_bytes == 2 * 24 * PAGE_BYTES  # the draft's pages too
    drain(runtime, tokens)
    assert [tokens[identity] for identity in ids[7:]] == expected[7:]


def test_a_request_that_needs_the_pool_alone_is_given_pages_at_once(tiny_llama: Path, reference: PreTrainedModel) -> None:
    rules = RULES.model_copy(update={"num_batches": 1000})
    runtime = open_native(tiny_llama, kv_plan(num_pages=64), NativeOptions(debug=True, initial_pages=2, resize=rules))
    prompt = tuple(range(20, 70))
    assert generate(runtime, [GenerationRequest(prompt, 30)]) == [greedy(reference, prompt, 30)]
    assert (runtime.activity().num_preemptions, runtime.activity().num_orders) == (0, 0)


def test_free_pages_are_put_in_order_in_a_quiet_window(tiny_llama: Path, expected: list[list[int]]) -> None:
    requests = [GenerationRequest(prompt, NUM_NEW, shares_prefix=True) for prompt in PROMPTS]
    reset = RULES.model_copy(update={"num_batches": 1000})  # quiet as soon as the last request has ended
    for rules in (ResizeRules(), reset):
        runtime = open_resizing(tiny_llama, rules=rules)
        runtime.resize_pool(MAX_PAGES)
        for _ in range(3):
            assert generate(runtime, requests) == expected
        activity = runtime.activity()
        assert (activity.pool.num_cached > 0) == (activity.num_orders == 0) == (rules is not reset)
    assert activity.pool.num_free == MAX_PAGES
    assert 1 <= activity.num_orders <= 3  # at the end of a round in whose course scatter was looked at, every 32 batches
    runtime.submit(requests[0])
    runtime.step()
    with pytest.raises(PoolMisuse, match="sequences are live"):
        runtime.reset_pool()
