"""Servers of tiny models: ONNX engines, which open in about a second, in a thread of the test's process."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import httpx
from deploy_fixtures import fit
from release_fixtures import make_inputs
from report_fixtures import FLOAT, INT8, compiled, stored

from model_optimizer.artifacts.base import Stored
from model_optimizer.artifacts.compiled import CompiledModel, Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.compilation.export import export_model
from model_optimizer.protocols import GenerationRequest
from model_optimizer.release.deploy import Checks
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.runtimes.registry import RUNTIMES, framework_version
from model_optimizer.serving.card import LaunchCard
from model_optimizer.serving.config import ServeConfig
from model_optimizer.serving.server import Stop, run_server

PLAN = KvPlan(page_tokens=16, num_pages=1024, bytes_per_token=512, max_batch=4, max_model_len=4096)
UNCHECKED = Checks(before=fit, after=fit)
"""Deploy without opening engines twice: what is tested here is the server, not the check."""


def write_onnx_model(checkpoint: Path, target: Path) -> Path:
    """Write a plain directory with config, tokenizer, KV plan and ONNX engine of a checkpoint."""
    shutil.copytree(checkpoint, target)
    export_model(checkpoint, target)
    (target / "kv_cache_config.json").write_text(json.dumps({"kv_cache_format": 1, **PLAN.model_dump(mode="json")}))
    return target


@dataclass
class Running:
    """A server that answers."""

    card: LaunchCard
    stop: Stop
    thread: threading.Thread

    @property
    def url(self) -> str:
        return self.card.url

    def gauge(self, name: str) -> float:
        """Return one value of /metrics; `name` with its labels, without the common prefix."""
        text = httpx.get(f"{self.url}/metrics").text
        line = next((it for it in text.splitlines() if it.startswith(f"model_optimizer_{name} ")), f"{name} 0")
        return float(line.rpartition(" ")[2])

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)


@contextmanager
def running(path: Path, config: ServeConfig) -> Iterator[Running]:
    """Run a server on a free port until the block ends."""
    told = threading.Event()
    announced: list[tuple[LaunchCard, Stop]] = []
    faults: list[BaseException] = []

    def announce(card: LaunchCard, stop: Stop) -> None:
        announced.append((card, stop))
        told.set()

    def run() -> None:
        try:
            run_server(path, config, 0, announce)
        except BaseException as error:
            faults.append(error)
        finally:
            told.set()

    thread = threading.Thread(target=run)
    thread.start()
    told.wait(180)
    if faults:
        thread.join()
        raise faults[0]
    card, stop = announced[0]
    try:
        yield Running(card, stop, thread)
    finally:
        stop(now=True)
        thread.join(30)
    assert not faults


def until(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    """Ask again until something holds; it fails where that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to hold"


async def holds(condition: Callable[[], bool]) -> None:
    """The same beside other tasks."""
    await asyncio.to_thread(until, condition)


def onnx_greedy(model: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """What the engine itself answers, in this process."""
    engine = Engine(runtime="onnxruntime", directory=".", num_bytes=1, framework_version=framework_version("onnxruntime"))
    runtime = RUNTIMES.get("onnxruntime").open(engine, model, PLAN)
    runtime.submit(GenerationRequest(prompt, num_tokens, (2,)))
    tokens: list[int] = []
    while events := runtime.step():
        tokens += [event.token for event in events]
    runtime.close()
    return tokens


def onnx_entry(root: Path, model: Path, strategy: Strategy, name: str) -> Stored[CompiledModel]:
    """A compiled entry that holds the ONNX engine of a directory written above."""
    directory = root / name
    (directory / "engine").mkdir(parents=True)
    for file in ("model.onnx", "model.onnx.data"):
        shutil.copyfile(model / file, directory / "engine" / file)
    (directory / "layout.json").write_text('{"ops": []}')
    artifact = compiled(strategy)
    version = metadata.version("onnxruntime").partition("+")[0]
    engine = artifact.engine.model_copy(update={"runtime": "onnxruntime", "framework_version": version})
    return stored(name, artifact.model_copy(update={"engine": engine}), directory)


def bundle_inputs(root: Path, checkpoint: Path, chosen: Path, baseline: Path) -> PackageInputs:
    """Inputs of a release whose engine and baseline are the two ONNX models."""
    inputs = make_inputs(root, checkpoint)
    (root / "memory" / "kv_cache_config.json").write_text(json.dumps({"kv_cache_format": 1, **PLAN.model_dump(mode="json")}))
    engines = {
        "engine": onnx_entry(root, chosen, INT8, "chosen"),
        "baseline_engine": onnx_entry(root, baseline, FLOAT, "reference"),
    }
    return inputs.model_copy(update=engines)
