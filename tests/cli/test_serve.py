"""`model-optimizer serve`: what it prints, how it ends, and with which code it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from entry import Command
from release_fixtures import make_inputs, package
from serving_fixtures import PLAN, until, write_onnx_model

COMMAND = str(Path(sys.executable).with_name("model-optimizer"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    root = tmp_path_factory.mktemp("serve-cli")
    write_onnx_model(tiny_llama, root / "onnx")
    (root / "serve.yaml").write_text("model_path: onnx\nengine: {runtime: onnxruntime}\nlimits: {drain_timeout_s: 30}\n")
    inputs = make_inputs(root, tiny_llama)
    shutil.copyfile(root / "onnx" / "kv_cache_config.json", root / "memory" / "kv_cache_config.json")
    package(inputs, root)
    return root


def test_serve_answers_and_ends_with_0_once_sigterm_has_drained_it(place: Path) -> None:
    arguments = [COMMAND, "serve", "--config", "serve.yaml", "--port", "0", "--json"]
    with subprocess.Popen(arguments, cwd=place, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        card = json.loads(process.stdout.readline())
        assert (card["model"], card["max_batch"], card["capacity_tokens"]) == ("onnx", 4, PLAN.capacity_tokens)
        assert card["load_s"] > 0 and {line["part"] for line in card["memory"]["budget"]} >= {
            "weights",
            "kv_reservation",
            "margin",
        }
        body = {"model": "onnx", "prompt": "hello", "max_tokens": 700, "stream": True}
        with httpx.stream("POST", f"{card['url']}/v1/completions", json=body, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{card['url']}/health").status_code == 503)
            assert httpx.post(f"{card['url']}/v1/completions", json=body).json()["error"]["code"] == "draining"
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0


def test_serve_refuses_a_bundle_that_does_not_verify_with_6(place: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(place / "bundles", tmp_path / "bundles")
    (tmp_path / "bundles" / "chat-v1" / "config.yaml").write_text("x")
    key = tmp_path / "serve.yaml"
    key.write_text(f"public_key: {place / 'keys' / 'key.pem.pub'}\n")
    ended = command("serve", "--model_path", "bundles/chat-v1", "--config", "serve.yaml", "--port", "0", cwd=tmp_path)
    assert (ended.code, ended.out) == (6, "")
    assert "chat-v1/config.yaml: modified" in ended.err and ended.err.count("\n") == 1


def test_serve_ends_with_6_where_the_engine_is_no_graph(place: Path, command: Command) -> None:
    (place / "key.yaml").write_text("public_key: keys/key.pem.pub\n")  # intact, but the engine in it is made of noise
    ended = command("serve", "--model_path", "bundles/chat-v1", "--config", "key.yaml", "--port", "0", cwd=place)
    assert (ended.code, ended.out) == (6, "")
    assert "onnxruntime" in ended.err and ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "arguments", "code", "words"),
    [
        ("", (), 2, "give --model_path, or model_path in serve.yaml"),
        ("model_path: nowhere", (), 2, "nowhere holds nothing to serve"),
        ("limits: {max_wait: 1}", (), 2, "serve.yaml:1: limits.max_wait: unknown field; did you mean 'max_waiting'?"),
        ("kv: {max_batch: 0}", (), 2, "seen: 0"),
        ("host: not.a.host.invalid", ("--model-path", "."), 2, "cannot be bound"),
        ("engine: llamacpp", ("--model_path", "onnx"), 4, "llama-server is not in PATH; build it"),
        ("engine: vllm", ("--model_path", "onnx"), 4, "vllm is not in PATH; install vLLM in an environment of its own"),
        ("engine: {runtime: openvino}", ("--model_path", "onnx"), 2, "holds no openvino_model.xml"),
        ("engine: triton", ("--model_path", "onnx"), 2, "allowed: native, onnxruntime, openvino, vllm, llamacpp"),
        ("native: {keep_paked: true}", (), 2, "serve.yaml:1: native.keep_paked: unknown field; did you mean 'keep_packed'?"),
    ],
)
def test_serve_says_in_one_line_what_is_wrong(
    place: Path, command: Command, text: str, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (place / "other").mkdir(exist_ok=True)
    (place / "other" / "serve.yaml").write_text(text)
    ended = command("serve", "--config", "other/serve.yaml", "--port", "0", *arguments, cwd=place)
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err and ended.err.count("\n") == 1
