"""The OpenAI API of a running server, by the official client: one request, streams, many at once."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from serving_fixtures import PLAN, Running, holds, onnx_greedy, running, until, write_onnx_model

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.protocols import TokenBatch
from model_optimizer.runtimes.registry import RUNTIMES, framework_version
from model_optimizer.serving.config import EngineConfig, LimitsConfig, ServeConfig
from model_optimizer.serving.text import TextCodec, Turn

CONFIG = ServeConfig(engine=EngineConfig(runtime="onnxruntime"), limits=LimitsConfig(max_waiting=200))
LONG = "hello"
"""A prompt whose answer does not end by itself within 3000 tokens."""
PROMPTS = ("river lamp seven", "a", "quiet", "one two", "tee \u00e9\u4e2d", "bread window", "x" * 40, "7 8 9")
KEY = "not asked for"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return write_onnx_model(tiny_llama, tmp_path_factory.mktemp("serving") / "onnx")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(model, CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def codec(model: Path) -> TextCodec:
    return TextCodec.read(model)


def visible(codec: TextCodec, tokens: list[int]) -> str:
    return codec.decode([token for token in tokens if token not in codec.ends])


def test_completion_equals_the_engine_asked_directly(client: openai.OpenAI, model: Path, codec: TextCodec) -> None:
    for prompt in PROMPTS[:4]:
        tokens = onnx_greedy(model, tuple(codec.encode(prompt)), 40)
        answer = client.completions.create(model="onnx", prompt=prompt, max_tokens=40)
        assert answer.choices[0].text == visible(codec, tokens)
        assert answer.choices[0].finish_reason == ("stop" if tokens[-1] in codec.ends else "length")
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(codec.encode(prompt)), len(tokens))


def test_chat_renders_the_template_and_streams_the_same_text(client: openai.OpenAI, model: Path, codec: TextCodec) -> None:
    turns = [Turn("system", "be kind"), Turn("user", "hi")]
    tokens = onnx_greedy(model, tuple(codec.encode_chat(turns)), 24)
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    whole = client.chat.completions.create(model="onnx", messages=messages, max_completion_tokens=24)  # type: ignore[call-overload]
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model="onnx", messages=messages, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert whole.choices[0].message.content == visible(codec, tokens)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == visible(codec, tokens)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage and all(chunk.usage is None for chunk in chunks[:-1])


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="onnx", prompt=LONG, max_tokens=60).choices[0].text
    stop = whole[20:23]
    at = whole.index(stop)
    cut = client.completions.create(model="onnx", prompt=LONG, max_tokens=60, stop=["never there", stop])
    streamed = list(client.completions.create(model="onnx", prompt=LONG, max_tokens=60, stop=stop, stream=True))
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (whole[:at], "stop")
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole[:at]
    assert streamed[-1].choices[0].finish_reason == "stop"
    assert cut.usage is not None and cut.usage.completion_tokens < 60


def test_logprobs_are_those_of_scoring_the_same_tokens(client: openai.OpenAI, model: Path, codec: TextCodec) -> None:
    prompt = codec.encode("quiet")
    tokens = onnx_greedy(model, tuple(prompt), 8)
    engine = Engine(runtime="onnxruntime", directory=".", num_bytes=1, framework_version=framework_version("onnxruntime"))
    runtime = RUNTIMES.get("onnxruntime").open(engine, model, PLAN)
    expected = runtime.score(TokenBatch((tuple(prompt + tokens),), (len(prompt),)))[0].log_probs
    runtime.close()
    text = client.completions.create(model="onnx", prompt=prompt, max_tokens=8, logprobs=2).choices[0].logprobs
    assert text is not None and text.token_logprobs is not None and text.top_logprobs is not None and text.tokens is not None
    np.testing.assert_allclose(text.token_logprobs, expected, atol=1e-4)
    assert text.text_offset == [sum(len(token) for token in text.tokens[:at]) for at in range(8)]
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model="onnx", messages=messages, max_tokens=6, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
    for entry in chat.choices[0].logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] == entry.logprob


def test_seed_repeats_a_drawn_answer(client: openai.OpenAI) -> None:
    def drawn(seed: int) -> str:
        return client.completions.create(model="onnx", prompt="a", max_tokens=20, temperature=1.5, seed=seed).choices[0].text

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("num_clients", [16, pytest.param(64, marks=pytest.mark.full)])
def test_concurrent_answers_equal_single_ones(server: Running, client: openai.OpenAI, num_clients: int) -> None:
    alone = {prompt: client.completions.create(model="onnx", prompt=prompt, max_tokens=12).choices[0].text for prompt in PROMPTS}

    async def ask(many: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 2:
            answer = await many.completions.create(model="onnx", prompt=prompt, max_tokens=12)
            return prompt, answer.choices[0].text
        stream = await many.completions.create(model="onnx", prompt=prompt, max_tokens=12, stream=True)
        return prompt, "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as many:
            return await asyncio.gather(*[ask(many, number) for number in range(num_clients)])

    for prompt, text in asyncio.run(all_at_once()):
        assert text == alone[prompt]
    assert server.gauge("open_requests") == 0


def test_a_client_that_leaves_frees_its_cache_at_once(server: Running) -> None:
    body = {"model": "onnx", "prompt": LONG, "max_tokens": 4000}
    before = server.gauge("generated_tokens_total")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as stream:
        lines = stream.iter_lines()
        first = next(it for it in lines if it)
        assert json.loads(first.removeprefix("data: "))["object"] == "text_completion"
        assert server.gauge("open_requests") == 1
    until(lambda: server.gauge("open_requests") == 0 and server.gauge("kv_used_bytes") == 0)

    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            task = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body, timeout=60))
            await holds(lambda: server.gauge("open_requests") == 1 and server.gauge("kv_used_bytes") > 0)
            task.cancel()

    asyncio.run(leave())
    until(lambda: server.gauge("open_requests") == 0 and server.gauge("kv_used_bytes") == 0)
    assert server.gauge("generated_tokens_total") - before < 4000


def test_models_health_and_metrics_say_what_is_served(server: Running, client: openai.OpenAI) -> None:
    assert [(model.id, model.owned_by) for model in client.models.list()] == [("onnx", "model-optimizer")]
    assert client.models.retrieve("onnx").id == "onnx"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    for path in ("/health", "/v2/health/live", "/v2/health/ready"):
        assert httpx.get(server.url + path).status_code == 200
    assert server.gauge("engine_up") == 1
    assert server.gauge("kv_pool_bytes") == PLAN.capacity_tokens * PLAN.bytes_per_token
    card = server.card
    assert {line.part: line.num_bytes for line in card.memory.budget}["kv_reservation"] == 1024 * 16 * 512
    assert (card.capacity_tokens, card.max_batch, card.max_model_len) == (16384, 4, 4096)
    assert card.quantization == "none (float32)" and "kv_cache_config.json" in card.kv_origin
