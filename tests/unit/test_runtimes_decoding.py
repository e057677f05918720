"""The padded batching core over transformers: every request as if it were alone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, RequestId, TokenBatch
from model_optimizer.runtimes import scoring
from model_optimizer.runtimes.backends.torch import open_padded
from model_optimizer.runtimes.registry import RUNTIMES, framework_version

PROMPTS = ((5, 6, 7), (100,), tuple(range(10, 60)), (9, 8, 7, 6, 5, 4, 3, 2), (42, 42))
PLAN = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=2 * 2 * 2 * 16 * 4, max_batch=3, max_model_len=256)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


def open_torch(directory: Path, plan: KvPlan = PLAN) -> LogitsRuntime:
    return open_padded(directory, plan, framework_version("torch"), "the padded core is the subject of these tests")


@pytest.fixture
def runtime(tiny_llama: Path) -> Iterator[LogitsRuntime]:
    opened = open_torch(tiny_llama)
    yield opened
    opened.close()


def greedy(model: PreTrainedModel, prompt: tuple[int, ...], num_new: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
    )
    return output[0, len(prompt) :].tolist()


def drain(runtime: LogitsRuntime, tokens: dict[RequestId, list[int]]) -> None:
    while events := runtime.step():
        for event in events:
            tokens.setdefault(event.request, []).append(event.token)


def test_step_gives_the_greedy_tokens_of_each_request_alone(runtime: LogitsRuntime, reference: PreTrainedModel) -> None:
    lengths = (12, 20, 5, 9, 30)
    ids = [runtime.submit(GenerationRequest(prompt, length)) for prompt, length in zip(PROMPTS, lengths, strict=True)]
    tokens: dict[RequestId, list[int]] = {}
    drain(runtime, tokens)
    for identity, prompt, length in zip(ids, PROMPTS, lengths, strict=True):
        assert tokens[identity] == greedy(reference, prompt, length)


def test_step_is_unchanged_when_a_request_joins_midway(runtime: LogitsRuntime, reference: PreTrainedModel) -> None:
    first = runtime.submit(GenerationRequest(PROMPTS[0], 16))
    tokens: dict[RequestId, list[int]] = {}
    for _ in range(5):
        (event,) = runtime.step()
        tokens.setdefault(event.request, []).append(event.token)
    second = runtime.submit(GenerationRequest(PROMPTS[2], 16))
    drain(runtime, tokens)
    assert tokens == {first: greedy(reference, PROMPTS[0], 16), second: greedy(reference, PROMPTS[2], 16)}


def test_step_log_prob_matches_the_log_softmax(runtime: LogitsRuntime, reference: PreTrainedModel) -> None:
    runtime.submit(GenerationRequest(PROMPTS[2], 1))
    (event,) = runtime.step()
    with torch.inference_mode():
        log_probs = reference(torch.tensor([PROMPTS[2]])).logits[0, -1].log_softmax(-1)
    assert event.finished
    assert event.log_prob == pytest.approx(float(log_probs.max()), abs=1e-4)


def test_step_ends_a_request_at_its_stop_token(runtime: LogitsRuntime, reference: PreTrainedModel) -> None:
    expected = greedy(reference, PROMPTS[0], 10)
    stop = expected[4]
    runtime.submit(GenerationRequest(PROMPTS[0], 10, stop_tokens=(stop,)))
    tokens: dict[RequestId, list[int]] = {}
    drain(runtime, tokens)
    assert list(tokens.values()) == [expected[: expected.index(stop) + 1]]
    assert runtime.memory().kv_bytes == 0


def test_step_never_runs_more_than_the_plan_allows(tiny_llama: Path) -> None:
    plan = PLAN.model_copy(update={"num_pages": 4, "max_batch": 8})
    runtime = open_torch(tiny_llama, plan)
    for _ in range(6):
        runtime.submit(GenerationRequest((7,) * 20, 10))  # 29 cached tokens: two pages
    counts = []
    while events := runtime.step():
        counts.append(len(events))
        assert sum(not event.finished for event in events) <= 2
        assert runtime.memory().kv_bytes <= plan.capacity_tokens * plan.bytes_per_token
    assert counts[0] == 2
    assert sum(counts) == 60


def test_cancel_frees_the_cache_and_leaves_the_others_alone(runtime: LogitsRuntime, reference: PreTrainedModel) -> None:
    long, short = runtime.submit(GenerationRequest(PROMPTS[2], 40)), runtime.submit(GenerationRequest(PROMPTS[0], 8))
    waiting = [runtime.submit(GenerationRequest(PROMPTS[1], 4)) for _ in range(2)][1]
    tokens: dict[RequestId, list[int]] = {}
    for event in runtime.step() + runtime.step():
        tokens.setdefault(event.request, []).append(event.token)
    before = runtime.memory().kv_bytes
    runtime.cancel(long)
    runtime.cancel(waiting)
    runtime.cancel(RequestId(999))
    assert runtime.memory().kv_bytes == 2 * 4 * PLAN.bytes_per_token  # two rows of the 3 + 1 tokens of `short`
    assert before == 3 * 51 * PLAN.bytes_per_token
    drain(runtime, tokens)
    assert tokens[short] == greedy(reference, PROMPTS[0], 8)
    assert len(tokens[long]) == 2
    assert waiting not in tokens


@pytest.mark.parametrize(
    ("prompt", "num_new", "message"),
    [
        ((), 4, "prompt is empty"),
        ((1,) * 250, 10, "250 prompt \\+ 10 new tokens exceed max_model_len 256"),
        ((1, 260), 4, "leave the vocabulary 0..259"),
        ((1,), 0, "max_new_tokens is 0"),
    ],
)
def test_submit_refuses_what_cannot_run(runtime: LogitsRuntime, prompt: tuple[int, ...], num_new: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runtime.submit(GenerationRequest(prompt, num_new))


def test_submit_refuses_a_request_larger_than_the_cache(tiny_llama: Path) -> None:
    runtime = open_torch(tiny_llama, PLAN.model_copy(update={"num_pages": 2}))
    with pytest.raises(ConfigError, match="needs 3 KV pages of 16 tokens and the plan holds 2"):
        runtime.submit(GenerationRequest((1,) * 30, 4))


@pytest.mark.parametrize("logits_bytes", [2**28, 260 * 4 * 7])
def test_score_matches_transformers_whatever_the_block(
    runtime: LogitsRuntime, reference: PreTrainedModel, logits_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "LOGITS_BYTES", logits_bytes)
    starts = (1, 1, 30, 3, 2)
    scores = runtime.score(TokenBatch(PROMPTS, starts))
    for prompt, start, score in zip(PROMPTS, starts, scores, strict=True):
        with torch.inference_mode():
            log_probs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1).numpy()
        expected = [log_probs[t - 1, prompt[t]] for t in range(start, len(prompt))]
        np.testing.assert_allclose(score.log_probs, expected, atol=1e-4)
        assert score.is_greedy.tolist() == [bool(log_probs[t - 1].argmax() == prompt[t]) for t in range(start, len(prompt))]


@pytest.mark.parametrize("logits_bytes", [2**28, 260 * 4 * 7])
def test_logits_match_transformers(
    runtime: LogitsRuntime, reference: PreTrainedModel, logits_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "LOGITS_BYTES", logits_bytes)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPTS[2]])).logits[0].numpy()
    np.testing.assert_allclose(runtime.logits(PROMPTS[2]), expected, atol=1e-4)
    np.testing.assert_allclose(runtime.logits(PROMPTS[2][:1]), expected[:1], atol=1e-4)


def test_memory_counts_a_tied_head_once(runtime: LogitsRuntime, reference: PreTrainedModel) -> None:
    parameters = sum(parameter.nbytes for parameter in reference.parameters())
    assert parameters <= runtime.memory().weight_bytes <= parameters + 4096  # rotary buffers


def test_open_refuses_an_engine_of_another_version(tiny_llama: Path) -> None:
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version="1.0.0")
    with pytest.raises(UnsupportedError, match=r"built for torch 1.0.0 and .* is installed; .*--from compile"):
        RUNTIMES.get("torch").open(engine, tiny_llama, PLAN)
