"""Continuous batching over pages: every request as if it were alone, whatever happens around it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_fixtures import drain, generate, greedy, kv_plan
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.protocols import GenerationRequest, RequestId, Sampling
from model_optimizer.runtimes.torch.config import NativeOptions
from model_optimizer.runtimes.torch.engine import NativeRuntime, open_native

PROMPTS = ((5, 6, 7), (100,), tuple(range(10, 60)), (9, 8, 7, 6, 5, 4, 3, 2), (42, 42))
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Keys and values x layers x KV heads x head dimension x float32."""


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> PreTrainedModel:
    return load_dequantized(tiny_llama)


def open_tiny(directory: Path, plan: KvPlan | None = None, **options: int | bool) -> NativeRuntime:
    return open_native(directory, plan or kv_plan(), NativeOptions(debug=True, **options))


def test_generation_is_right_across_page_borders(tiny_llama: Path, reference: PreTrainedModel) -> None:
    prompts = [tuple(range(20, 20 + length)) for length in range(1, 14)]  # pages of 4: every remainder, several pages
    requests = [GenerationRequest(prompt, 9) for prompt in prompts]
    runtime = open_tiny(tiny_llama, kv_plan(num_pages=128, max_batch=16))
    assert generate(runtime, requests) == [greedy(reference, prompt, 9) for prompt in prompts]


def test_generation_is_unchanged_by_prefix_hits(tiny_llama: Path, reference: PreTrainedModel) -> None:
    common = tuple(range(30, 52))
    prompts = [(*common, *tail) for tail in ((1, 2), (3,), (1, 2, 4, 5, 6, 7), ())]
    runtime = open_tiny(tiny_llama)
    for prompt in (*prompts, prompts[0]):
        assert generate(runtime, [GenerationRequest(prompt, 6, shares_prefix=True)]) == [greedy(reference, prompt, 6)]
    pool = runtime.activity().pool
    assert pool.hit_tokens == 20 + 24 + 20 + 20  # whole pages of 4, never the last token; the third finds what was generated
    assert pool.asked_tokens == sum(map(len, (*prompts, prompts[0])))


def test_requests_that_do_not_share_find_nothing_and_are_not_found(tiny_llama: Path, reference: PreTrainedModel) -> None:
    runtime = open_tiny(tiny_llama)
    for shares in (True, False, False):
        request = GenerationRequest(PROMPTS[2], 5, shares_prefix=shares)
        assert generate(runtime, [request]) == [greedy(reference, PROMPTS[2], 5)]
    assert runtime.activity().pool.hit_tokens == 0


def test_generation_is_unchanged_by_preemption(tiny_llama: Path, reference: PreTrainedModel) -> None:
    prompts = [tuple(range(start, start + 8)) for start in (10, 40, 70, 100)]
    runtime = open_tiny(tiny_llama, kv_plan(num_pages=12))
    assert generate(runtime, [GenerationRequest(prompt, 24) for prompt in prompts]) == [
        greedy(reference, prompt, 24) for prompt in prompts
    ]
    activity = runtime.activity()
    assert activity.num_preemptions >= 2
    assert (activity.pool.num_used, activity.pool.num_sequences) == (0, 0)


def test_as_many_requests_run_at_once_as_fit_at_their_full_length(tiny_llama: Path) -> None:
    plan = kv_plan(num_pages=48, max_batch=4)  # 4 requests of 48 tokens in pages of 4, to the last page
    runtime, most_running = open_tiny(tiny_llama, plan), 0
    for start in range(4):
        runtime.submit(GenerationRequest(tuple(range(start, start + 40)), 8))
    while runtime.step():
        most_running = max(most_running, runtime.activity().num_running)
    assert (most_running, runtime.activity().num_preemptions) == (4, 0)


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_generation_is_unchanged_by_chunks_of_the_prompt(tiny_llama: Path, reference: PreTrainedModel, budget: int) -> None:
    runtime = open_tiny(tiny_llama, max_prefill_tokens=budget)
    requests = [GenerationRequest(prompt, 5) for prompt in PROMPTS]
    assert generate(runtime, requests) == [greedy(reference, prompt, 5) for prompt in PROMPTS]


def test_advance_decodes_while_a_long_prompt_is_computed_in_chunks(tiny_llama: Path) -> None:
    runtime = open_tiny(tiny_llama, max_prefill_tokens=10)
    short = runtime.submit(GenerationRequest(PROMPTS[0], 20))
    runtime.advance()
    runtime.submit(GenerationRequest(PROMPTS[2], 2))
    seen = [[event.request for event in runtime.advance()] for _ in range(5)]
    assert seen[:4] == [[short]] * 4
    assert len(seen[4]) == 2


def test_step_never_prefills_more_requests_or_tokens_than_the_caps(tiny_llama: Path) -> None:
    runtime = open_tiny(tiny_llama, max_prefills=2, max_prefill_tokens=6)
    for _ in range(4):
        runtime.submit(GenerationRequest((1, 2, 3), 3))
    assert [len(runtime.step()) for _ in range(5)] == [2, 4, 4, 2, 0]


def test_step_never_runs_more_requests_than_the_plan_allows(tiny_llama: Path) -> None:
    runtime = open_tiny(tiny_llama, kv_plan(max_batch=3))
    for _ in range(7):
        runtime.submit(GenerationRequest((1, 2), 4))
    counts = []
    while events := runtime.step():
        counts.append(len(events))
    assert max(counts) == 3
    assert sum(counts) == 28


def test_cancel_gives_the_pages_back_and_leaves_the_others_alone(tiny_llama: Path, reference: PreTrainedModel) -> None:
    runtime = open_tiny(tiny_llama, kv_plan(max_batch=2))
    long, short, waiting = (runtime.submit(GenerationRequest(PROMPTS[at], 8)) for at in (2, 0, 1))
    runtime.step()
    assert runtime.memory().kv_bytes == 53 * BYTES_PER_TOKEN
    assert runtime.activity().pool.num_used == 14
    for request in (long, waiting, RequestId(999)):
        runtime.cancel(request)
    assert runtime.memory().kv_bytes == 3 * BYTES_PER_TOKEN
    assert runtime.activity().pool.num_used == 1
    tokens = drain(runtime)
    assert tokens == {short: greedy(reference, PROMPTS[0], 8)[1:]}
    assert runtime.activity().pool.num_used == 0


def test_cancel_in_the_middle_of_a_chunked_prompt_gives_the_pages_back(tiny_llama: Path) -> None:
    runtime = open_tiny(tiny_llama, max_prefill_tokens=10)
    request = runtime.submit(GenerationRequest(PROMPTS[2], 8))
    assert runtime.advance() == []
    runtime.cancel(request)
    assert runtime.step() == []
    assert runtime.activity().pool.num_used == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest((), 4), "prompt is empty"),
        (GenerationRequest((1,) * 120, 10), "120 prompt \\+ 10 new tokens exceed max_model_len 128"),
        (GenerationRequest((1,) * 30, 40), "needs 18 KV pages of 4 tokens and the plan holds 16"),
        (GenerationRequest((1, 260), 4), "leave the vocabulary 0..259"),
        (GenerationRequest((-1,), 4), "leave the vocabulary 0..259"),
        (GenerationRequest((1,), 0), "max_new_tokens is 0"),
        (GenerationRequest((1,), 1, sampling=Sampling(temperature=-1)), "temperature is -1; 0 .greedy. to 100"),
        (GenerationRequest((1,), 1, sampling=Sampling(temperature=float("nan"))), "temperature is nan"),
        (GenerationRequest((1,), 1, sampling=Sampling(top_p=0)), "top_p is 0; more than 0"),
        (GenerationRequest((1,), 1, sampling=Sampling(top_k=-2)), "top_k is -2; 0"),
        (GenerationRequest((1,), 1, num_top=261), "num_top is 261; 0 to 260"),
    ],
)
def test_submit_refuses_by_name_and_hurts_nobody(
    tiny_llama: Path, reference: PreTrainedModel, request_: GenerationRequest, message: str
) -> None:
    runtime = open_tiny(tiny_llama, kv_plan(num_pages=16))
    good = runtime.submit(GenerationRequest(PROMPTS[0], 6))
    runtime.step()
    with pytest.raises(ConfigError, match=message):
        runtime.submit(request_)
    assert drain(runtime) == {good: greedy(reference, PROMPTS[0], 6)[1:]}


def test_step_ends_a_request_at_its_stop_token(tiny_llama: Path, reference: PreTrainedModel) -> None:
    expected = greedy(reference, PROMPTS[0], 10)
    runtime = open_tiny(tiny_llama)
    assert generate(runtime, [GenerationRequest(PROMPTS[0], 10, stop_tokens=(expected[4],))]) == [
        expected[: expected.index(expected[4]) + 1]
    ]
    assert runtime.memory().kv_bytes == 0


def test_step_ends_a_request_whose_logits_are_not_finite_and_hurts_nobody(
    tiny_llama: Path, reference: PreTrainedModel, tmp_path: Path
) -> None:
    tensors = load_file(tiny_llama / "model.safetensors")
    tensors["model.embed_tokens.weight"][77] = torch.inf  # a token that breaks whoever reads it, and never its neighbours
    tensors["lm_head.weight"] = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = (tiny_llama / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (tmp_path / "config.json").write_text(config)
    runtime = open_native(tmp_path, kv_plan(num_pages=12))
    bad, good = runtime.submit(GenerationRequest((7, 77, 8), 20)), runtime.submit(GenerationRequest(PROMPTS[3], 12))
    events = runtime.step()
    assert [(event.request, event.finished) for event in events] == [(bad, True), (good, False)]
    assert np.isnan(events[0].log_prob)
    assert [events[1].token, *drain(runtime)[good]] == greedy(reference, PROMPTS[3], 12)
    assert generate(runtime, [GenerationRequest(PROMPTS[2][:30], 12)]) == [greedy(reference, PROMPTS[2][:30], 12)]


def test_step_log_prob_matches_the_log_softmax(tiny_llama: Path, reference: PreTrainedModel) -> None:
    runtime = open_tiny(tiny_llama)
    runtime.submit(GenerationRequest(PROMPTS[2], 1, num_top=3))
    (event,) = runtime.step()
    with torch.inference_mode():
        best = reference(torch.tensor([PROMPTS[2]])).logits[0, -1].log_softmax(-1).topk(3)
    assert event.finished
    assert event.log_prob == pytest.approx(float(best.values[0]), abs=1e-4)
    assert [token for token, _ in event.top] == best.indices.tolist()
    assert [log_prob for _, log_prob in event.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_pages_grow_to_what_requests_need_and_never_beyond_the_plan(tiny_llama: Path, reference: PreTrainedModel) -> None:
    runtime = open_tiny(tiny_llama, kv_plan(num_pages=40), initial_pages=2)
    page_bytes = 4 * BYTES_PER_TOKEN
    assert runtime.memory().pool_bytes == 2 * page_bytes
    assert generate(runtime, [GenerationRequest(PROMPTS[0], 9)]) == [greedy(reference, PROMPTS[0], 9)]
    assert runtime.memory().pool_bytes == 4 * page_bytes  # 11 tokens: 3 pages
    requests = [GenerationRequest(prompt, 12) for prompt in PROMPTS * 2]
    assert generate(runtime, requests) == [greedy(reference, prompt, 12) for prompt in PROMPTS * 2]
    assert runtime.memory().pool_bytes == 40 * page_bytes


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "fp8"])
def test_generation_on_narrow_pages_does_not_depend_on_the_batch(tiny_llama: Path, precision: str) -> None:
    plan = kv_plan().model_copy(update={"precision": precision})
    requests = [GenerationRequest(prompt, 8) for prompt in PROMPTS]
    together = generate(open_tiny(tiny_llama, plan), requests)
    assert together == [generate(open_tiny(tiny_llama, plan), [request])[0] for request in requests]


def test_close_refuses_further_use_by_name(tiny_llama: Path) -> None:
    runtime = open_tiny(tiny_llama)
    runtime.submit(GenerationRequest(PROMPTS[0], 4))
    runtime.close()
    with pytest.raises(ConfigError, match="runtime is closed"):
        runtime.submit(GenerationRequest(PROMPTS[0], 4))


@pytest.fixture(scope="module")
def shared(tiny_llama: Path) -> dict[int, NativeRuntime]:
    """One pool that must preempt and one that never does, by number of pages."""
    return {pages: open_tiny(tiny_llama, kv_plan(num_pages=pages, max_batch=4), max_prefill_tokens=9) for pages in (11, 64)}


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> NativeRuntime:
    return open_tiny(tiny_llama)


SEQUENCES = st.tuples(st.sampled_from((*PROMPTS, PROMPTS[2][:21], PROMPTS[2][:9])), st.integers(1, 12), st.integers(0, 3))
"""Prompt (some begin alike), new tokens, and how many steps pass before it joins."""


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(SEQUENCES, min_size=1, max_size=7), st.sampled_from([11, 64]), st.sets(st.integers(0, 6), max_size=2), st.booleans()
)
def test_tokens_are_the_same_alone_and_in_any_batch(
    shared: dict[int, NativeRuntime],
    alone: NativeRuntime,
    drawn: list[tuple[tuple[int, ...], int, int]],
    num_pages: int,
    cancelled: set[int],
    sampled: bool,
) -> None:
    runtime, tokens, ids = shared[num_pages], dict[RequestId, list[int]](), list[RequestId]()
    requests = [
        GenerationRequest(
            prompt[:30], length, sampling=Sampling(temperature=0.9, seed=at) if sampled else Sampling(), shares_prefix=at % 3 > 0
        )
        for at, (prompt, length, _) in enumerate(drawn)
    ]
    for request, (_, _, pause) in zip(requests, drawn, strict=True):
        ids.append(runtime.submit(request))
        for event in [event for _ in range(pause) for event in runtime.step()]:
            tokens.setdefault(event.request, []).append(event.token)
    for at in cancelled & set(range(len(ids))):
        runtime.cancel(ids[at])
    drain(runtime, tokens)
    for at, (identity, request) in enumerate(zip(ids, requests, strict=True)):
        expected = generate(alone, [replace(request, shares_prefix=False)])[0]
        got = tokens.get(identity, [])
        assert got == (expected[: len(got)] if at in cancelled else expected)
    assert runtime.activity().pool.num_used == 0
