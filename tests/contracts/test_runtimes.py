"""What every runtime of the registry must do, tried on engines that its own compile target built."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from serving_fixtures import running
from transformers import PreTrainedModel

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.registry import TARGETS, BuildRequest
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, TokenBatch
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.serving.config import ServeConfig
from model_optimizer.serving.text import TextCodec
from model_optimizer.store import Store

PLAN = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=2 * 2 * 2 * 16 * 4, max_batch=4, max_model_len=256)
PLAIN = WeightRecipe()
PROMPTS = ((5, 6, 7), (100,), tuple(range(10, 60)), (9, 8, 7, 6, 5, 4, 3, 2))
SUPPORTED = [name for name in RUNTIMES.names() if RUNTIMES.get(name).supports(Strategy(weights=PLAIN, runtime=name)).supported]
REFUSED = sorted(set(RUNTIMES.names()) - set(SUPPORTED))


@pytest.fixture(scope="session")
def reference(tiny_llama: Path) -> PreTrainedModel:
    return load_dequantized(tiny_llama)


@pytest.fixture(scope="session", params=SUPPORTED)
def engine(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    root = tmp_path_factory.mktemp(f"engine-{request.param}")
    target = TARGETS.get(request.param)
    build = BuildRequest(Tree.of(tiny_llama), tiny_llama, PLAIN, CompileConfig(timeout_s=300), "test", Store(root / "store"))
    (variant,) = target.variants(PLAIN)
    (root / "work").mkdir()
    engine = target.build(build, variant, root / "work").engine
    return engine, root / "work" / engine.directory


@pytest.fixture
def runtime(engine: tuple[Engine, Path]) -> Iterator[LogitsRuntime]:
    opened = RUNTIMES.get(engine[0].runtime).open(*engine, PLAN)
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


def log_probs(model: PreTrainedModel, tokens: tuple[int, ...]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()


def test_supports_two_runtimes_at_least() -> None:
    assert {"onnxruntime", "torch"} <= set(SUPPORTED)


def test_score_equals_transformers(runtime: LogitsRuntime, reference: PreTrainedModel) -> None:
    starts = (1, 1, 20, 2)
    for prompt, start, score in zip(PROMPTS, starts, runtime.score(TokenBatch(PROMPTS, starts)), strict=True):
        expected = log_probs(reference, prompt)
        np.testing.assert_allclose(score.log_probs, [expected[t - 1, prompt[t]] for t in range(start, len(prompt))], atol=1e-3)
        assert score.log_probs.dtype == np.float32
        assert len(score.is_greedy) == len(prompt) - start


def test_score_does_not_depend_on_batch_mates(runtime: LogitsRuntime) -> None:
    together = runtime.score(TokenBatch(PROMPTS, (1, 1, 1, 1)))
    for prompt, score in zip(PROMPTS, together, strict=True):
        (alone,) = runtime.score(TokenBatch((prompt,), (1,)))
        np.testing.assert_allclose(score.log_probs, alone.log_probs, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 7, 50])
def test_logits_equal_transformers(runtime: LogitsRuntime, reference: PreTrainedModel, num_tokens: int) -> None:
    tokens = PROMPTS[2][:num_tokens]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    logits = runtime.logits(tokens)
    assert logits.shape == (num_tokens, 260)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_generation_equals_greedy_whoever_shares_the_batch(runtime: LogitsRuntime, reference: PreTrainedModel) -> None:
    lengths = (24, 6, 12, 18)
    ids = {}
    tokens: dict[int, list[int]] = {}
    for prompt, length in zip(PROMPTS, lengths, strict=True):  # each joins two steps after the one before
        ids[runtime.submit(GenerationRequest(prompt, length))] = (prompt, length)
        for event in runtime.step() + runtime.step():
            tokens.setdefault(event.request, []).append(event.token)
    while events := runtime.step():
        for event in events:
            tokens.setdefault(event.request, []).append(event.token)
    assert tokens == {identity: greedy(reference, *request) for identity, request in ids.items()}


def test_cancel_frees_the_cache(runtime: LogitsRuntime) -> None:
    request = runtime.submit(GenerationRequest(PROMPTS[2], 30))
    runtime.step()
    assert runtime.memory().kv_bytes == 50 * PLAN.bytes_per_token
    runtime.cancel(request)
    assert runtime.memory().kv_bytes == 0
    assert runtime.step() == []


def test_memory_counts_weights_and_process(runtime: LogitsRuntime, reference: PreTrainedModel) -> None:
    reading = runtime.memory()
    weights = sum(parameter.nbytes for parameter in reference.parameters())
    head = reference.get_input_embeddings().weight.nbytes  # a tied head may be held twice
    assert weights <= reading.weight_bytes <= weights + head + 8192
    assert reading.process_bytes > reading.weight_bytes


def test_facts_name_the_runtime(engine: tuple[Engine, Path], runtime: LogitsRuntime) -> None:
    facts = runtime.facts
    assert (facts.name, facts.version, facts.precision) == (engine[0].runtime, engine[0].framework_version, "float32")
    assert (facts.max_batch, facts.max_model_len) == (4, 256)


def test_served_tokens_are_the_runtimes_own(
    engine: tuple[Engine, Path], runtime: LogitsRuntime, tiny_llama: Path, tmp_path: Path
) -> None:
    if engine[0].runtime == "torch":
        pytest.skip("what test_serving_native is about")
    model = shutil.copytree(engine[1], tmp_path / "chat")
    shutil.copytree(tiny_llama, model, dirs_exist_ok=True)
    (model / "kv_cache_config.json").write_text(PLAN.model_dump_json())
    codec = TextCodec.read(model)
    prompt = codec.encode("river lamp seven")
    runtime.submit(GenerationRequest(tuple(prompt), 12, codec.ends))
    tokens = [event.token for _ in range(12) for event in runtime.step()]
    with running(model, ServeConfig.model_validate({"engine": engine[0].runtime})) as server:
        answer = server.post("/v1/completions", model="chat", prompt=prompt, max_tokens=12).json()
    assert answer["choices"][0]["text"] == codec.decode([token for token in tokens if token not in codec.ends])
    assert answer["usage"]["completion_tokens"] == len(tokens)


def test_submit_refuses_an_empty_prompt(runtime: LogitsRuntime) -> None:
    with pytest.raises(ConfigError, match="prompt is empty"):
        runtime.submit(GenerationRequest((), 4))


def test_open_refuses_an_engine_of_another_version(engine: tuple[Engine, Path]) -> None:
    other = engine[0].model_copy(update={"framework_version": "0.0.1"})
    with pytest.raises(UnsupportedError, match=r"built for .* 0.0.1 and .* is installed"):
        RUNTIMES.get(other.runtime).open(other, engine[1], PLAN)


@pytest.mark.parametrize("name", REFUSED)
def test_supports_gives_a_reason_when_it_refuses(name: str, tmp_path: Path) -> None:
    strategy = Strategy(weights=PLAIN, runtime=name)
    assert len(RUNTIMES.get(name).supports(strategy).reason) > 20
    engine = Engine(runtime=name, directory=".", num_bytes=0, framework_version="1")
    with pytest.raises(UnsupportedError):
        RUNTIMES.get(name).open(engine, tmp_path, PLAN)
