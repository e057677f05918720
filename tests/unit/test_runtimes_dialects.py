"""What is said to vLLM and llama.cpp, and how their answers are understood."""

import json
import math
from pathlib import Path

import pytest

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.protocols import GenerationRequest, Sampling
from model_optimizer.runtimes.backends.llamacpp import SPARE_TOKENS, LlamaCpp
from model_optimizer.runtimes.backends.vllm import Vllm
from model_optimizer.runtimes.managed.dialect import END_OF_TEXT, Dialect, Heard, Launch, Scored, StreamFault
from model_optimizer.runtimes.options import ManagedOptions

PLAN = KvPlan(page_tokens=16, num_pages=1024, bytes_per_token=512, max_batch=4, max_model_len=4096)
REQUEST = GenerationRequest((5, 6), 9, (2, 3), Sampling(temperature=0.5, top_p=0.9, top_k=7, seed=2**40), 2)


def launch(plan: KvPlan = PLAN, options: ManagedOptions | None = None) -> Launch:
    return Launch(Path("/opt/program"), Path("/models/chat"), plan, options or ManagedOptions(), 1234, "secret")


def pairs(dialect: Dialect, start: Launch) -> dict[str, str]:
    command = dialect.command(start)
    at = next(index for index, part in enumerate(command) if part.startswith("--"))
    return dict(zip(command[at::2], command[at + 1 :: 2], strict=False))


def test_vllm_is_started_with_the_plans_limits() -> None:
    said = pairs(Vllm(), launch(options=ManagedOptions(dtype="bfloat16")))
    assert Vllm().command(launch())[:3] == ("/opt/program", "serve", "/models/chat")
    assert (said["--max-model-len"], said["--max-num-seqs"], said["--dtype"]) == ("4096", "4", "bfloat16")
    assert (said["--kv-cache-dtype"], said["--kv-cache-memory-bytes"]) == ("auto", str(1024 * 16 * 512))
    assert (said["--host"], said["--port"]) == ("127.0.0.1", "1234")
    assert Vllm().environment(launch())["VLLM_API_KEY"] == "secret"


def test_vllm_gets_fp8_pages_a_share_of_the_gpu_and_at_least_one_longest_request() -> None:
    fp8 = PLAN.model_copy(update={"precision": "fp8", "num_pages": 256})
    assert pairs(Vllm(), launch(fp8))["--kv-cache-dtype"] == "fp8"
    assert pairs(Vllm(), launch(fp8))["--kv-cache-memory-bytes"] == str((4096 // 128 + 2) * 128 * 512)
    shared = pairs(Vllm(), launch(options=ManagedOptions(utilization_ratio=0.8)))
    assert shared["--gpu-memory-utilization"] == "0.8" and "--kv-cache-memory-bytes" not in shared
    with pytest.raises(UnsupportedError, match=r"in int8 and vllm in fp8, float32, bfloat16, float16"):
        Vllm().command(launch(PLAN.model_copy(update={"precision": "int8"})))


def test_vllm_is_asked_in_tokens_and_ends_only_where_we_say() -> None:
    body = Vllm().body(REQUEST)
    assert (body["prompt"], body["max_tokens"], body["stop_token_ids"], body["ignore_eos"]) == ((5, 6), 9, (2, 3), True)
    assert (body["temperature"], body["top_p"], body["top_k"], body["seed"], body["logprobs"]) == (0.5, 0.9, 7, 2**40, 2)


def test_vllm_is_understood() -> None:
    scores = {"tokens": ["token_id:7", "token_id:2"], "token_logprobs": [-0.5, -1], "text_offset": [0, 1]}
    scores["top_logprobs"] = [{"token_id:9": -2.0, "token_id:7": -0.5}, {"token_id:2": -1.0}]
    choice = {"index": 0, "text": "x", "token_ids": [7, 2], "logprobs": scores, "finish_reason": "stop", "stop_reason": 2}
    heard = Vllm().hear(json.dumps({"id": "1", "choices": [choice]}).encode())
    assert heard == Heard((Scored(7, -0.5, ((7, -0.5), (9, -2.0))), Scored(2, -1, ((2, -1.0),))), True, None)
    unsaid = {**choice, "token_ids": [], "logprobs": None}
    assert Vllm().hear(json.dumps({"choices": [unsaid]}).encode()) == Heard((), True, 2)
    assert Vllm().hear(b'{"choices": [], "usage": {}}') == Heard(())
    with pytest.raises(ValueError, match="choices"):
        Vllm().hear(b'{"error": "x"}')


def test_llamacpp_is_started_with_slots_that_share_one_context() -> None:
    said = pairs(LlamaCpp(), launch(PLAN.model_copy(update={"precision": "int8"})))
    assert (said["--ctx-size"], said["--parallel"], said["--cache-type-k"]) == (str(4 * (4096 + SPARE_TOKENS)), "4", "q8_0")
    assert (said["--model"], said["--port"]) == ("/models/chat", "1234")
    for plan, options in (
        (PLAN.model_copy(update={"precision": "fp8"}), ManagedOptions()),
        (PLAN, ManagedOptions(dtype="float16")),
    ):
        with pytest.raises(UnsupportedError, match=r"llama\.cpp"):
            LlamaCpp().command(launch(plan, options))


def test_llamacpp_is_asked_and_understood() -> None:
    body = LlamaCpp().body(REQUEST)
    assert (body["prompt"], body["n_predict"], body["n_probs"], body["min_p"], body["seed"]) == (
        (5, 6), 9 + SPARE_TOKENS, 2, 0.0, 2**40 % 2**32,
    )  # fmt: skip
    probabilities = [{"id": 7, "token": "x", "logprob": -0.5, "top_logprobs": [{"id": 7, "token": "x", "logprob": -0.5}]}]
    event = {"index": 0, "content": "x", "tokens": [7], "stop": False, "completion_probabilities": probabilities}
    assert LlamaCpp().hear(json.dumps(event).encode()) == Heard((Scored(7, -0.5, ((7, -0.5),)),), spelled=b"x")
    held = {"index": 0, "content": "😀", "tokens": [218], "stop": False, "tokens_predicted": 4}  # as seen: one of three tokens
    told = LlamaCpp().hear(json.dumps(held).encode())
    assert (told.num_generated, told.spelled, told.tokens[0].token) == (4, bytes([240, 159, 152, 128]), 218)
    assert LlamaCpp().hear(b'{"content": "", "stop": true, "stop_type": "eos", "tokens": []}') == Heard((), True, END_OF_TEXT)
    assert LlamaCpp().hear(b'{"content": "", "stop": true, "stop_type": "limit"}') == Heard((), True, None)
    for dialect in (LlamaCpp(), Vllm()):
        with pytest.raises(StreamFault, match=r"^too hot$"):
            dialect.hear(b'{"error": {"code": 500, "message": "too hot", "type": "server_error"}}')
    (scored,) = LlamaCpp().hear(b'{"content": "x", "tokens": [8], "stop": false}').tokens
    assert scored.token == 8 and math.isnan(scored.log_prob)


def test_find_model_takes_what_the_server_loads_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seen: none"):
        LlamaCpp().find_model(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"")
    assert LlamaCpp().find_model(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"seen: a\.gguf, b\.gguf"):
        LlamaCpp().find_model(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint"):
        Vllm().find_model(tmp_path)
