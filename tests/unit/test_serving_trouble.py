"""What a server does in trouble: malformed requests, a full queue, a killed engine, keys, limits, the end of its life."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from serving_fixtures import Running, running, until, write_onnx_model

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.serving.config import ApiKeyConfig, EngineConfig, KvConfig, LimitsConfig, ServeConfig

KEY = "sk-test-1"
LONG = "hello"
NUM_GENERATED = 15
"""Requests that schemathesis draws for each operation."""
MODEL = {"model": "onnx"}
TEXT = MODEL | {"prompt": "a", "max_tokens": 1}
CHAT = MODEL | {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
DEEP = b'{"model": "onnx", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
RAW = [
    b"",
    b" ",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"1",
    b"NaN",
    b"\xff\xfe",
    b"\x00",
    b'{"model": "onnx", "prompt": "\\ud800"}',
    b'{"model": "onnx", "prompt": "\xc3\x28"}',
    b'{"model": "onnx", "prompt": "a", "temperature": NaN}',
    b'{"model": "onnx", "prompt": "a", "temperature": 1e999}',
    b'{"model": "onnx", "prompt": "a", "seed": ' + b"9" * 400 + b"}",
    b'{"model": "onnx", "prompt": "a", "max_tokens": 1} trailing',
    b"{'model': 'onnx'}",
    DEEP,
]
TEXT_FAULTS: list[dict[str, object]] = [
    {"prompt": None},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [""]},
    {"prompt": ["a", "b"]},
    {"prompt": [[1], [2]]},
    {"prompt": [-1]},
    {"prompt": [10**6]},
    {"prompt": [2**40]},
    {"prompt": [1.5]},
    {"prompt": ["a", 1]},
    {"prompt": {"text": "a"}},
    {"prompt": True},
    {"prompt": "a" * 5000},
    {"prompt": [5] * 4097},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": "1"},
    {"max_tokens": 1.5},
    {"max_tokens": 4096},
    {"max_tokens": 2**31},
    {"model": "other"},
    {"model": None},
    {"model": 3},
    {"model": ""},
    {"model": "x" * 1000},
    {"model": "../../etc/passwd"},
    {"n": 0},
    {"n": 2},
    {"n": "1"},
    {"n": True},
    {"best_of": True},
    {"echo": 0},
    {"best_of": 2},
    {"echo": True},
    {"suffix": "end"},
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": "hot"},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.01},
    {"seed": "x"},
    {"seed": 2**63},
    {"logprobs": -1},
    {"logprobs": 6},
    {"logprobs": True},
    {"stop": ""},
    {"stop": [""]},
    {"stop": ["a"] * 5},
    {"stop": "x" * 257},
    {"stop": 7},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"surprise": 1}},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"logit_bias": {"5": 10}},
    {"user": 5},
    {"unknown_field": 1},
    {"__proto__": {}},
]
CHAT_FAULTS: list[dict[str, object]] = [
    {"messages": []},
    {"messages": None},
    {"messages": "hi"},
    {"messages": [{}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"content": "hi"}]},
    {"messages": [{"role": "root", "content": "hi"}]},
    {"messages": [{"role": "tool", "content": "hi", "tool_call_id": "1"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": "hi", "extra": 1}]},
    {"messages": [{"role": "user", "content": "a" * 5000}]},
    {"messages": [{"role": "user", "content": "a"}] * 4097},
    {"max_completion_tokens": 0},
    {"logprobs": 1},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "auto"},
    {"functions": []},
    {"response_format": {"type": "json_object"}},
    {"n": 3},
    {"store": True},
    {"store": 0},
    {"reasoning_effort": "high"},
    {"modalities": ["audio"]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return write_onnx_model(tiny_llama, tmp_path_factory.mktemp("serving") / "onnx")


def config(**limits: int | float) -> ServeConfig:
    return ServeConfig(
        engine=EngineConfig(runtime="onnxruntime"),
        kv=KvConfig(max_batch=2),
        limits=LimitsConfig.model_validate({"max_waiting": 1, "max_body_bytes": 50_000} | limits),
    )


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(model, config()) as server:
        yield server


@contextmanager
def stream(server: Running, max_tokens: int = 4000) -> Iterator[Iterator[str]]:
    """A long answer that runs: its first token has come."""
    body = MODEL | {"prompt": LONG, "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        yield lines


def assert_right(server: Running) -> None:
    """The server answers as it did before anything happened."""
    answer = server.post("/v1/completions", **MODEL, prompt="river lamp seven", max_tokens=300).json()
    assert answer["usage"] == {"prompt_tokens": 16, "completion_tokens": 217, "total_tokens": 233}
    assert answer["choices"][0]["finish_reason"] == "stop"


def assert_refused(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"] and error["type"] and error["code"] and "\n" not in error["message"]


def test_malformed_requests_get_4xx_with_a_reason_and_hurt_nobody(server: Running) -> None:
    url, kind = server.url, {"content-type": "application/json"}
    alone = server.post("/v1/completions", **MODEL, prompt=LONG, max_tokens=700).json()["choices"][0]["text"]
    with httpx.Client(timeout=60) as client, stream(server, 700) as lines:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for raw in RAW:
                assert_refused(client.post(url + path, content=raw, headers=kind))
        for fault in TEXT_FAULTS:
            assert_refused(client.post(f"{url}/v1/completions", json=TEXT | fault))
        for fault in CHAT_FAULTS:
            assert_refused(client.post(f"{url}/v1/chat/completions", json=CHAT | fault))
        for missing in ("model", "prompt"):
            assert_refused(client.post(f"{url}/v1/completions", json={k: v for k, v in TEXT.items() if k != missing}))
        for other in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ";", "\x7f"):
            assert client.post(f"{url}/v1/completions", content=b"{}", headers={"content-type": other}).status_code == 415
        assert client.post(f"{url}/v1/completions", content=b" " * 50_001, headers=kind).status_code == 413
        for method, path in (("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/metrics"), ("PUT", "/health")):
            assert client.request(method, url + path).status_code == 405
        for path in ("/", "/v1", "/v1/embeddings", "/v1/completions/", "/v1/models/%00", "/v1/models/..%2f..", "/docs", "//"):
            assert_refused(client.get(url + path))
        chunks = [json.loads(line.removeprefix("data: ")) for line in list(lines)[:-1]]
        assert alone.endswith("".join(chunk["choices"][0]["text"] for chunk in chunks)) and len(chunks) > 300
    assert_right(server)
    assert server.gauge("open_requests") == 0


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.NEGATIVE, schemathesis.GenerationMode.POSITIVE])
def test_generated_requests_never_give_5xx(server: Running, mode: schemathesis.GenerationMode) -> None:
    statuses: list[int] = []
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.method.upper() != "POST" and mode is schemathesis.GenerationMode.NEGATIVE:
            continue  # nothing in it can be wrong

        @settings(
            max_examples=NUM_GENERATED, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            if mode is schemathesis.GenerationMode.POSITIVE and isinstance(case.body, dict):
                case.body |= {"model": "onnx", "max_tokens": 2}  # past the first two checks
            statuses.append(case.call(timeout=60).status_code)

        ask()
    assert not [status for status in statuses if status >= 500]
    assert len(statuses) >= 2 * NUM_GENERATED
    assert_right(server)


def test_an_answer_is_not_held_back_by_nagle_and_delayed_acknowledgement(server: Running) -> None:
    with httpx.Client() as client:
        waits_ms = [client.get(f"{server.url}/v1/models").elapsed.total_seconds() * 1000 for _ in range(20)]
    assert min(waits_ms) < 35  # each would take at least the 40 ms for which Linux delays an acknowledgement


def test_a_full_queue_answers_429_and_others_go_on(server: Running) -> None:
    with stream(server), stream(server):
        waiting = threading.Thread(target=server.post, args=("/v1/completions",), kwargs=TEXT)
        waiting.start()
        until(lambda: server.gauge("open_requests") == 3)
        assert (server.gauge("requests_running"), server.gauge("requests_waiting")) == (2, 1)
        refused = server.post("/v1/completions", **TEXT)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
    waiting.join(60)
    until(lambda: server.gauge("open_requests") == 0)
    assert_right(server)


def test_a_killed_engine_gives_503_and_comes_back(server: Running) -> None:
    with stream(server) as lines:
        (engine,) = engines()
        engine.kill()
        last = list(lines)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_down"
    refused = server.post("/v1/completions", **TEXT)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    down = httpx.get(f"{server.url}/v2/health/ready")
    assert down.status_code == 503 and int(down.headers["retry-after"]) >= 1
    assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
    until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    assert server.gauge("engine_restarts") == 1
    assert_right(server)


def test_an_engine_that_stalls_is_replaced(model: Path) -> None:
    engine = EngineConfig(runtime="onnxruntime", stall_timeout_s=0.7)
    with running(model, config().model_copy(update={"engine": engine})) as server, stream(server) as lines:
        before = {process.pid for process in engines()}
        stalled = max(engines(), key=lambda process: process.create_time())
        stalled.suspend()
        assert json.loads(list(lines)[-1].removeprefix("data: "))["error"]["code"] == "engine_down"
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        assert stalled.pid not in {process.pid for process in engines()} and len(engines()) == len(before)
        assert_right(server)


def engines() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "model_optimizer.serving.worker" in child.cmdline()]


def test_keys_limits_and_draining(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\nsk-test-2\n")
    settings = config(request_timeout_s=2).model_copy(
        update={"api_key": ApiKeyConfig(file=tmp_path / "keys"), "served_name": "chat"}
    )
    with running(model, settings) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        for wrong in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"):
            answer = httpx.get(f"{server.url}/v1/models", headers={"authorization": wrong})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert [model.id for model in client.models.list()] == ["chat"]
        with pytest.raises(openai.APIStatusError) as late:
            client.completions.create(model="chat", prompt=LONG, max_tokens=4000)
        assert (late.value.status_code, late.value.code) == (504, "timeout")
        until(lambda: server.gauge("open_requests") == 0)
        answer = client.completions.create(model="chat", prompt=LONG, max_tokens=700, stream=True)
        first = next(answer)
        server.stop()
        until(lambda: httpx.get(f"{server.url}/v2/health/ready").status_code == 503)
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(model="chat", prompt="a", max_tokens=1)
        assert (refused.value.status_code, refused.value.code) == (503, "draining")
        rest = list(answer)
        assert rest[-1].choices[0].finish_reason == "length" and first.choices[0].finish_reason is None
        server.thread.join(30)
        assert not server.thread.is_alive() and not engines()[1:]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"engine": {"runtime": "onnxruntime", "start_timeout_s": 0.01}}, UnsupportedError, "not loaded within 0.01 s"),
        ({"engine": {"runtime": "nonsense"}}, ConfigError, "allowed: native, onnxruntime, openvino, vllm, llamacpp"),
        ({"engine": {"runtime": "onnxruntime"}, "api_key": {"file": "/nowhere"}}, ConfigError, "api_key.file"),
        ({"engine": {"runtime": "onnxruntime"}, "host": "256.0.0.1"}, ConfigError, "cannot be bound"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    model: Path, settings: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words), running(model, ServeConfig.model_validate(settings)):
        pass
