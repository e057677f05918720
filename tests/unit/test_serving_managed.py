"""Engines of other projects as managed processes: right through, watched, started again, and gone when the server is.

The peer is a test peer (`peer_server`), a real process over real HTTP with a rule in place of a model.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from peer_server import BREAK, CRASH, REFUSE, SLOW, VERSION, rule, write_program
from serving_fixtures import PLAN, Running, running, until

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.errors import ConfigError, ModelOptimizerError, UnsupportedError
from model_optimizer.protocols import GenerationRequest
from model_optimizer.runtimes.faults import RequestFault
from model_optimizer.runtimes.options import TUNABLES, ManagedOptions, RuntimeOptions
from model_optimizer.serving.config import LimitsConfig, ServeConfig
from model_optimizer.serving.text import TextCodec

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    directory = tmp_path_factory.mktemp("managed") / "chat"
    directory.mkdir()
    for path in tiny_llama.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "kv_cache_config.json").write_text(json.dumps({"kv_cache_format": 1, **PLAN.model_dump(mode="json")}))
    return directory


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_program(tmp_path_factory.mktemp("program") / "vllm")


@pytest.fixture(scope="module")
def config(program: Path) -> ServeConfig:
    stated = {"engine": "vllm", "managed": {"command": program, "dtype": "float32"}}
    return ServeConfig.model_validate(stated).model_copy(update={"limits": LimitsConfig(max_waiting=2)})


@pytest.fixture(scope="module")
def server(model: Path, config: ServeConfig) -> Iterator[Running]:
    with running(model, config) as server:
        yield server


def family() -> list[psutil.Process]:
    """The peers below this process, and their children; other tests leave servers of other kinds running beside them."""
    found = [it for it in psutil.Process().children(recursive=True) if it.is_running()]
    return [it for it in found if "serve" in it.cmdline()[2:] or any("test peer" in part for part in it.cmdline())]


def peer() -> psutil.Process:
    (found,) = [it for it in family() if "serve" in it.cmdline()]
    return found


def text_of(model: Path, prompt: list[int], num_tokens: int) -> str:
    return TextCodec.read(model).decode([rule(prompt, number) for number in range(num_tokens)])


@contextmanager
def slow_stream(server: Running, max_tokens: int = 2000) -> Iterator[Iterator[str]]:
    body = {"model": "chat", "prompt": [SLOW, 9], "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        yield lines


def told(line: str) -> str:
    return str(json.loads(line.removeprefix("data: "))["error"]["code"])


def test_answers_are_the_engines_own_tokens(server: Running, model: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    whole = client.completions.create(model="chat", prompt=PROMPT, max_tokens=30, logprobs=1)
    assert whole.choices[0].text == text_of(model, PROMPT, 30)
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.token_logprobs == [-0.25] * 30
    assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 30)
    stream = client.completions.create(model="chat", prompt=PROMPT, max_tokens=30, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == text_of(model, PROMPT, 30)
    stopped = client.completions.create(model="chat", prompt=PROMPT, max_tokens=30, stop=whole.choices[0].text[10:13])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (whole.choices[0].text[:10], "stop")
    assert server.card.runtime == f"vllm {VERSION} on the device that it chose, float32"


def test_one_request_that_the_engine_refuses_or_drops_hurts_no_other(server: Running) -> None:
    with slow_stream(server, 100) as lines:
        refused = server.post("/v1/completions", model="chat", prompt=[REFUSE, 1], max_tokens=8)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "refused_by_engine")
        assert "the test peer refuses this" in refused.json()["error"]["message"]
        broken = server.post("/v1/completions", model="chat", prompt=[BREAK, 1], max_tokens=8)
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "engine_failed")
        assert int(broken.headers["retry-after"]) >= 1
        rest = list(lines)
    assert rest[-1] == "data: [DONE]" and len(rest) == 100
    assert server.gauge("engine_restarts") == 0


def test_full_queues_answer_429_and_cancelled_requests_end_at_the_engine(server: Running) -> None:
    threads = [threading.Thread(target=hold, args=(server,)) for _ in range(PLAN.max_batch + 2)]
    for thread in threads:
        thread.start()
    until(lambda: server.gauge("open_requests") == PLAN.max_batch + 2)
    refused = server.post("/v1/completions", model="chat", prompt=PROMPT, max_tokens=1)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    for thread in threads:
        thread.join()
    until(lambda: server.gauge("open_requests") == 0)
    answer = server.post("/v1/completions", model="chat", prompt=PROMPT, max_tokens=1)
    assert answer.status_code == 200
    until(lambda: not [it for it in peer().net_connections() if it.status == psutil.CONN_ESTABLISHED])


def hold(server: Running) -> None:
    with slow_stream(server) as lines:
        for _ in range(20):
            next(lines)


def test_an_engine_that_dies_at_work_gives_503_and_comes_back(server: Running, model: Path) -> None:
    before = {process.pid for process in family()}
    with slow_stream(server) as lines:
        answer = server.post("/v1/completions", model="chat", prompt=[CRASH, 1], max_tokens=8)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
        assert told(list(lines)[-1]) == "engine_down"
    down = server.post("/v1/completions", model="chat", prompt=PROMPT, max_tokens=1)
    assert down.status_code == 503 and int(down.headers["retry-after"]) >= 1
    until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    answer = server.post("/v1/completions", model="chat", prompt=PROMPT, max_tokens=9)
    assert answer.json()["choices"][0]["text"] == text_of(model, PROMPT, 9)
    assert not before & {process.pid for process in family()} and len(family()) == 2


def test_an_engine_that_dies_idle_is_noticed(server: Running) -> None:
    restarts = server.gauge("engine_restarts")
    peer().kill()
    until(lambda: server.gauge("engine_restarts") == restarts + 1)
    until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    assert len(family()) == 2


@pytest.mark.parametrize("ending", ["drained", "worker killed"])
def test_nothing_is_left_of_an_engine_that_has_ended(model: Path, config: ServeConfig, ending: str) -> None:
    others = {process.pid for process in family()}
    with running(model, config) as server:
        mine = [process for process in family() if process.pid not in others]
        assert len(mine) == 2
        if ending == "worker killed":
            worker = next(it for it in mine if "serve" in it.cmdline()).parent()
            assert worker is not None
            os.kill(worker.pid, signal.SIGKILL)
            until(lambda: not any(process.is_running() for process in mine))
        else:
            server.stop()
            server.thread.join(30)
    until(lambda: not any(process.is_running() for process in mine), 5)


def test_nothing_is_left_of_an_engine_whose_server_was_killed(model: Path, program: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(f"engine: vllm\nmanaged: {{command: {program}}}\n")
    options = ("--model_path", str(model), "--config", str(tmp_path / "serve.yaml"), "--port", "0", "--json")
    command = (sys.executable, "-m", "flows.cli", "serve", *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        descendants = psutil.Process(process.pid).children(recursive=True)
        assert len(descendants) == 3  # the engine's process, the peer, the peer's child
        process.kill()
    until(lambda: not any(it.is_running() and it.status() != psutil.STATUS_ZOMBIE for it in descendants), 30)


@pytest.mark.parametrize(
    ("engine", "managed", "error", "words"),
    [
        ("vllm", {}, UnsupportedError, r"vllm is not in PATH; install vLLM in an environment of its own .*managed.command"),
        ("vllm", {"command": "/nowhere/vllm"}, UnsupportedError, "managed.command /nowhere/vllm is no file"),
        ("vllm", {"environment": {"FAIL_WITH": "no such GPU"}}, UnsupportedError, "ended with 3; its last words: no such GPU"),
        ("llamacpp", {}, UnsupportedError, "llama-server is not in PATH; build it"),
        ("llamacpp", {"dtype": "float32"}, ConfigError, r"must hold one GGUF file for llama.cpp, seen: none; make one with"),
        ("tensorrt", None, UnsupportedError, "no engine could be built or tested here; use native or vllm"),
        ("native", {}, ConfigError, "managed: this section is for engine vllm or llamacpp, and the engine is torch"),
    ],
)
def test_a_managed_engine_that_cannot_start_says_why(
    model: Path, program: Path, engine: str, managed: dict[str, object] | None, error: type[ModelOptimizerError], words: str
) -> None:
    stated: dict[str, object] = {"engine": engine}
    if managed is not None:
        needs_program = "environment" in managed or "dtype" in managed
        stated["managed"] = {**({"command": program} if needs_program else {}), **managed}
    with pytest.raises(error, match=words), running(model, ServeConfig.model_validate(stated)):
        pass


def test_the_runtime_itself_tells_faults_apart_and_ends_at_stop_tokens(model: Path, program: Path) -> None:
    factory = TUNABLES.get("vllm").tuned(RuntimeOptions(managed=ManagedOptions(command=program)))
    runtime = factory.open(Engine(runtime="vllm", directory=".", num_bytes=7, framework_version="any"), model, PLAN)
    try:
        stop = rule(PROMPT, 4)
        runtime.submit(GenerationRequest(tuple(PROMPT), 20, (stop,)))
        bad = runtime.submit(GenerationRequest((REFUSE,), 4))
        events, faults = [], []
        for _ in range(50):
            try:
                events += runtime.step()
            except RequestFault as fault:
                faults.append(fault)
        assert [event.token for event in events] == [rule(PROMPT, number) for number in range(5)]
        assert [event.finished for event in events] == [False] * 4 + [True]
        assert [(fault.request, fault.refused) for fault in faults] == [(bad, True)]
        with pytest.raises(ConfigError, match=r"leave the vocabulary 0\.\.259"):
            runtime.submit(GenerationRequest((260,), 4))
        with pytest.raises(UnsupportedError, match="only asked for answers"):
            runtime.logits((1, 2))
        memory = runtime.memory()
        assert memory.weight_bytes == 7 and memory.kv_bytes == 0 and memory.process_bytes > 5 << 20
    finally:
        runtime.close()
