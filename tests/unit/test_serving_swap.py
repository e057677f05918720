"""Bundles behind a server: only what verifies is loaded, and `current` moves under load without losing a request."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from deploy_fixtures import publish
from serving_fixtures import PLAN, UNCHECKED, Running, bundle_inputs, onnx_greedy, running, until, write_onnx_model

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import SampleOutput
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.release.deploy import deploy, rollback
from model_optimizer.release.deployment_root import Reason
from model_optimizer.serving.config import EngineConfig, ServeConfig
from model_optimizer.serving.source import read_source
from model_optimizer.serving.text import TextCodec

WHY = Reason("test")
NUM_CLIENTS, NUM_TOKENS = 6, 40
PROMPT = "hello"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """Bundles chat-v0 (seed 1) and chat-v1 (seed 0), and the two models that are in them."""
    root = tmp_path_factory.mktemp("serving-swap")
    chosen = write_onnx_model(tiny_llama, root / "seed0")
    baseline = write_onnx_model(write_tiny_llama(root / "tiny1", seed=1), root / "seed1")
    codec, prompt = TextCodec.read(chosen), "seven"
    tokens = [onnx_greedy(model, tuple(codec.encode(prompt)), 9) for model in (chosen, baseline)]
    sample = SampleOutput(
        prompt=prompt,
        prompt_tokens=tuple(codec.encode(prompt)),
        text=codec.decode(tokens[0]),
        tokens=tuple(tokens[0]),
        baseline_text=codec.decode(tokens[1]),
        baseline_tokens=tuple(tokens[1]),
    )
    publish(bundle_inputs(root, tiny_llama, chosen, baseline), root, Verdict.ACCEPT, (sample,))
    return root


def healthy(bundle: Path, server: Running) -> str:
    """Run the bundle's own check against the server and return what it says."""
    done = subprocess.run([bundle / "health_check.sh", server.url], capture_output=True, text=True, timeout=60)
    return f"{done.returncode} {done.stdout}"


def expected(place: Path, seed: int) -> str:
    codec = TextCodec.read(place / f"seed{seed}")
    tokens = onnx_greedy(place / f"seed{seed}", tuple(codec.encode(PROMPT)), NUM_TOKENS)
    return codec.decode([token for token in tokens if token not in codec.ends])


@pytest.fixture
def server(place: Path, tmp_path: Path) -> Iterator[Running]:
    deploy(place / "bundles" / "chat-v0", tmp_path / "root", WHY, public_key=place / "keys" / "key.pem.pub", checks=UNCHECKED)
    with running(tmp_path / "root", ServeConfig(public_key=place / "keys" / "key.pem.pub", watch_s=0.05)) as server:
        yield server


def test_a_swap_under_load_loses_no_request(place: Path, tmp_path: Path, server: Running) -> None:
    texts = {expected(place, 1): "chat-v0", expected(place, 0): "chat-v1"}
    key = place / "keys" / "key.pem.pub"
    assert len(texts) == 2 and (server.card.model, server.card.quantization) == ("chat-v0", "float32/onnxruntime")
    assert "signature valid" in server.card.standing and server.card.kv_origin == "chat-v0/model/kv_cache_config.json"
    assert (server.card.capacity_tokens, len(server.card.optimizer_hash)) == (PLAN.capacity_tokens, 64)
    assert healthy(place / "bundles" / "chat-v0", server).startswith("0 ")
    assert healthy(place / "bundles" / "chat-v1", server).startswith("12 ")  # that is not what is served
    seen: list[str] = []
    done = asyncio.Event()

    async def ask_on_and_on(client: openai.AsyncOpenAI) -> None:
        while not done.is_set():
            stream = await client.completions.create(model="chat", prompt=PROMPT, max_tokens=NUM_TOKENS, stream=True)
            seen.append(texts["".join([chunk.choices[0].text async for chunk in stream])])

    async def swap() -> None:
        await asyncio.to_thread(until, lambda: len(seen) >= NUM_CLIENTS)
        await asyncio.to_thread(deploy, place / "bundles" / "chat-v1", tmp_path / "root", WHY, public_key=key, checks=UNCHECKED)
        await asyncio.to_thread(until, lambda: seen.count("chat-v1") >= NUM_CLIENTS)
        done.set()

    async def load() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            await asyncio.gather(swap(), *[ask_on_and_on(client) for _ in range(NUM_CLIENTS)])

    asyncio.run(load())
    assert healthy(place / "bundles" / "chat-v1", server).endswith("output: ok (1 samples)\n")
    assert seen[0] == "chat-v0" and seen[-1] == "chat-v1"
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [("chat", "chat-v1")]
    assert server.post("/v1/completions", model="chat-v0", prompt="a", max_tokens=1).status_code == 404
    spoil(tmp_path / "root" / "releases" / "chat-v0")
    rollback(tmp_path / "root", WHY)
    until(lambda: 'swaps_total{result="refused"} 1.0' in httpx.get(f"{server.url}/metrics").text)
    answer = server.post("/v1/completions", model="chat", prompt=PROMPT, max_tokens=NUM_TOKENS).json()
    assert texts[answer["choices"][0]["text"]] == "chat-v1"


def spoil(release: Path) -> None:
    """Change one byte and keep the size, which only hashing finds."""
    path = release / "model" / "config.json"
    path.chmod(0o644)
    content = path.read_bytes()
    path.write_bytes(content[:-3] + b" " + content[-2:])


def test_read_source_refuses_what_does_not_verify(place: Path, tmp_path: Path, tiny_llama: Path) -> None:
    for path in (place / "bundles").glob("chat-v1*"):
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, tmp_path / path.name)
    config = ServeConfig(public_key=place / "keys" / "key.pem.pub")
    assert read_source(tmp_path / "chat-v1", config).name == "chat-v1"
    vllm = read_source(tmp_path / "chat-v1", config.model_copy(update={"engine": EngineConfig(runtime="vllm")}))
    assert (vllm.engine.runtime, vllm.engine_directory) == ("vllm", tmp_path / "chat-v1" / "model")
    assert vllm.standing.endswith("VERIFIED WITH onnxruntime, served with vllm")
    with pytest.raises(
        ConfigError, match=r"holds an engine for onnxruntime and engine\.runtime is 'torch'; leave it out, or take vllm"
    ):
        read_source(tmp_path / "chat-v1", config.model_copy(update={"engine": EngineConfig(runtime="torch")}))
    (tmp_path / "chat-v1" / "model" / "extra.py").write_text("x")
    with pytest.raises(IntegrityError, match=r"extra\.py"):
        read_source(tmp_path / "chat-v1", config)
    with pytest.raises(ConfigError, match="holds nothing to serve"):
        read_source(tmp_path, config)
    with pytest.raises(ConfigError, match="no public key"):
        read_source(place / "bundles" / "chat-v1", config.model_copy(update={"public_key": tmp_path / "none.pub"}))
