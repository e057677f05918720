"""Where every layer has a window, pages that lie behind it are given back, and no token changes."""

from pathlib import Path

import pytest
from native_fixtures import COVERED, drain, generate, greedy, kv_plan, write_covered
from transformers import PreTrainedModel

from model_optimizer.formats.loading import load_dequantized
from model_optimizer.protocols import GenerationRequest
from model_optimizer.runtimes.torch.config import NativeOptions
from model_optimizer.runtimes.torch.engine import NativeRuntime, open_native

WINDOW, PAGE = 8, 4
MOST_PAGES = WINDOW // PAGE + 1
"""Of a decoding request: the window seldom begins where a page does."""
PROMPTS = (tuple(range(5, 60)), (7, 8, 9), tuple(range(5, 45)), tuple(range(100, 117)))
NUM_NEW = 24


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COVERED["mistral-window"]().sliding_window == WINDOW
    return write_covered("mistral-window", tmp_path_factory.mktemp("windowed") / "model")


@pytest.fixture(scope="module")
def reference(windowed: Path) -> PreTrainedModel:
    return load_dequantized(windowed)


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel) -> list[list[int]]:
    return [greedy(reference, prompt, NUM_NEW) for prompt in PROMPTS]


def open_windowed(directory: Path, num_pages: int = 64, **options: int | Path) -> NativeRuntime:
    return open_native(directory, kv_plan(num_pages=num_pages), NativeOptions.model_validate({"debug": True, **options}))


def test_a_decoding_request_holds_no_more_pages_than_its_window(windowed: Path, expected: list[list[int]]) -> None:
    runtime = open_windowed(windowed)
    request = runtime.submit(GenerationRequest(PROMPTS[0], NUM_NEW))
    tokens, most = [], 0
    while events := runtime.step():
        tokens += [event.token for event in events]
        most = max(most, runtime.activity().pool.num_used)
        if not events[-1].finished:
            per_token = runtime.memory().kv_bytes // (2 * 2 * 2 * 16 * 4)  # sides x layers x KV heads x head dimension x float32
            assert WINDOW - 1 <= per_token < WINDOW + PAGE
    assert (tokens, most) == (expected[0], MOST_PAGES)
    assert runtime.activity().pool.num_used == 0 and request == 0


@pytest.mark.parametrize(("num_pages", "chunk"), [(64, 512), (64, 5), (32, 16)])
def test_tokens_equal_transformers_in_batches_chunks_and_after_preemption(
    windowed: Path, expected: list[list[int]], num_pages: int, chunk: int
) -> None:
    runtime = open_windowed(windowed, num_pages, max_prefill_tokens=chunk)
    requests = [GenerationRequest(prompt, NUM_NEW, shares_prefix=True) for prompt in PROMPTS]
    assert generate(runtime, requests) == expected
    assert generate(runtime, [*requests, *requests]) == expected * 2
    assert runtime.activity().pool.num_used == 0


def test_a_chunked_prompt_never_holds_all_of_its_pages(windowed: Path, expected: list[list[int]]) -> None:
    runtime = open_windowed(windowed, max_prefill_tokens=PAGE)
    runtime.submit(GenerationRequest(PROMPTS[0], NUM_NEW))
    used = []
    for _ in range(len(PROMPTS[0]) // PAGE):
        runtime.advance()
        used.append(runtime.activity().pool.num_used)
    assert max(used) <= MOST_PAGES < len(PROMPTS[0]) // PAGE
    assert list(drain(runtime).values()) == [expected[0]]


def test_a_draft_with_a_window_changes_no_token(windowed: Path, expected: list[list[int]]) -> None:
    runtime = open_windowed(windowed, draft=windowed, num_drafts=3)
    assert generate(runtime, [GenerationRequest(prompt, NUM_NEW) for prompt in PROMPTS]) == expected
    assert runtime.activity().num_accepted == runtime.activity().num_drafted > 0


def test_pages_stay_where_the_draft_sees_all_of_them(windowed: Path, expected: list[list[int]], tiny_llama: Path) -> None:
    runtime = open_windowed(windowed, draft=tiny_llama, num_drafts=3)
    runtime.submit(GenerationRequest(PROMPTS[0], NUM_NEW))
    events = runtime.step()
    assert runtime.activity().pool.num_used == -(-len(PROMPTS[0]) // PAGE)
    assert [event.token for event in events] + next(iter(drain(runtime).values())) == expected[0]
