"""What the server does under load and in trouble, at full strength: the official client, 64 streams, faults on purpose.

    make bench NAME=server_faults ARGS="--streams 64"

`streams`    64 at once, texts equal to those asked one at a time
`cancel`     64 that leave in the middle: every page comes back
`malformed`  each field with each kind of wrong value, and what schemathesis draws: 4xx, and the server still right
`kill`       the engine is killed under load: 503 with Retry-After, then right again without a restart of the server
`swap`       `current` moves back and forth under load: no request is lost, each answer is one release's own
`vllm`       streams, cancel and kill with vLLM as the engine (`--vllm PROGRAM`)
`llamacpp`   the same with llama.cpp (`--llamacpp PROGRAM`)

`swap` packages two releases of a tiny model with a real run first.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from benchmarks.equal_bits import resolved
from benchmarks.evidence import Figure, append
from benchmarks.malformed_requests import malformed_requests
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.release.deploy import Checks, deploy, rollback
from model_optimizer.release.deployment_root import Reason
from model_optimizer.release.health import Health
from tests.tiny import write_project

PARTS = ("streams", "cancel", "malformed", "kill", "swap", "vllm", "llamacpp")
WORKER = "model_optimizer.serving.worker"
PATIENCE_S = 240.0
SWAP_TOKENS = 24
WHY = Reason("benchmark of the server", override="a tiny model whose verdict is not what is looked at")


@dataclass(frozen=True)
class Server:
    """One server process."""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    start_s: float

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0, timeout=PATIENCE_S)

    def gauge(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        line = next((it for it in text.splitlines() if it.startswith(f"model_optimizer_{name} ")), f"{name} 0")
        return float(line.rpartition(" ")[2])

    def engine(self) -> psutil.Process:
        return next(it for it in psutil.Process(self.process.pid).children() if WORKER in it.cmdline())


@contextmanager
def serving(path: Path, settings: str, folder: Path) -> Iterator[Server]:
    """Run `model-optimizer serve` while the body runs."""
    (folder / "serve.yaml").write_text(settings)
    start = time.monotonic()
    options = ("--model_path", str(path), "--config", str(folder / "serve.yaml"), "--port", "0", "--json")
    with (folder / "serve.log").open("ab") as log:
        process = subprocess.Popen(
            (sys.executable, "-m", "flows.cli", "serve", *options), stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the server did not start:\n{(folder / 'serve.log').read_text()[-2000:]}")
            card = json.loads(line)
            served = httpx.get(f"{card['url']}/v1/models", timeout=30).json()["data"][0]["id"]
            yield Server(process, card["url"], served, time.monotonic() - start)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until(condition: Callable[[], bool], what: str) -> float:
    """Wait until something holds; return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > PATIENCE_S:
            raise SystemExit(f"{what}: not within {PATIENCE_S:.0f} s")
        time.sleep(0.05)
    return time.monotonic() - start


def prompts(count: int) -> list[str]:
    return [f"Story {number}: the lamp by river {number * 7}" for number in range(count)]


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str, num_tokens: int) -> str:
    stream = await client.completions.create(model=model, prompt=prompt, max_tokens=num_tokens, stream=True)
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def ask_all(server: Server, wanted: Sequence[str], num_tokens: int) -> list[str | BaseException]:
    async with server.client() as client:
        asked = [ask(client, server.model, prompt, num_tokens) for prompt in wanted]
        return await asyncio.gather(*asked, return_exceptions=True)


def alone(server: Server, wanted: Sequence[str], num_tokens: int) -> list[str]:
    """Return the texts of requests that were asked one at a time."""
    return [text for prompt in wanted for text in asyncio.run(ask_all(server, [prompt], num_tokens)) if isinstance(text, str)]


def is_right(server: Server, expected: Sequence[str], num_tokens: int) -> bool:
    return alone(server, prompts(len(expected)), num_tokens) == list(expected)


def measure_streams(case: str, server: Server, width: int, num_tokens: int) -> list[Figure]:
    """Ask `width` at once and compare every text with the one that it gets alone."""
    wanted = prompts(width)
    expected = alone(server, wanted, num_tokens)
    start = time.monotonic()
    texts = asyncio.run(ask_all(server, wanted, num_tokens))
    seconds = time.monotonic() - start
    failed = sum(isinstance(text, BaseException) for text in texts)
    other = sum(isinstance(text, str) and text != right for text, right in zip(texts, expected, strict=True))
    return [
        Figure(case, "streams_failed", failed, "requests", n=width),
        Figure(case, "streams_with_another_text", other, "requests", n=width),
        Figure(case, "streams_wall_s", seconds, "s", n=width),
    ]


async def _leave(server: Server, wanted: Sequence[str]) -> int:
    """Start answers and leave each after two pieces; return how many had begun."""

    async def one(client: openai.AsyncOpenAI, prompt: str) -> int:
        stream = await client.completions.create(model=server.model, prompt=prompt, max_tokens=400, stream=True)
        await anext(stream)
        await anext(stream)
        await stream.close()
        return 1

    async with server.client() as client:
        return sum(await asyncio.gather(*[one(client, prompt) for prompt in wanted]))


def measure_cancelled(case: str, server: Server, width: int, num_tokens: int) -> list[Figure]:
    """Leave in the middle and wait until nothing is held for anybody."""
    expected = alone(server, prompts(4), num_tokens)
    begun = asyncio.run(_leave(server, prompts(width)))
    seconds = until(lambda: server.gauge("kv_used_bytes") == server.gauge("open_requests") == 0, "pages of cancelled requests")
    return [
        Figure(case, "cancelled_requests", begun, "requests", n=width),
        Figure(case, "kv_bytes_held_after_cancel", server.gauge("kv_used_bytes"), "bytes", n=width),
        Figure(case, "pages_back_s", seconds, "s", n=width),
        Figure(case, "right_after_cancel", is_right(server, expected, num_tokens), "bool", n=4),
    ]


def measure_malformed(case: str, server: Server, per_operation: int, num_tokens: int) -> list[Figure]:
    """Send everything that is wrong; 4xx with an error object is the only right answer."""
    expected = alone(server, prompts(4), num_tokens)
    wrong: list[str] = []
    count = 0
    with httpx.Client(timeout=60) as client:
        for request in malformed_requests(server.model):
            count += 1
            answer = client.post(server.url + request.path, content=request.body, headers={"content-type": "application/json"})
            if not 400 <= answer.status_code < 500 or "message" not in answer.json()["error"]:
                wrong.append(f"{request.path} {request.name}: {answer.status_code}")
    drawn = _drawn(server, per_operation)
    print(*wrong, sep="\n", file=sys.stderr)
    return [
        Figure(case, "malformed_not_4xx", len(wrong), "requests", n=count),
        Figure(case, "schemathesis_5xx", sum(status >= 500 for status in drawn), "requests", n=len(drawn)),
        Figure(case, "schemathesis_4xx", sum(400 <= status < 500 for status in drawn), "requests", n=len(drawn)),
        Figure(case, "right_after_malformed", is_right(server, expected, num_tokens), "bool", n=4),
    ]


def _drawn(server: Server, per_operation: int) -> list[int]:
    """Return the statuses of requests that schemathesis draws from the server's own description, wrong ones and right ones."""
    statuses: list[int] = []
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    wrong, right = schemathesis.GenerationMode.NEGATIVE, schemathesis.GenerationMode.POSITIVE
    for operation in [found.ok() for found in schema.get_all_operations()]:
        for mode in (wrong, right) if operation.method.upper() == "POST" else (right,):
            statuses += _sent(server, operation.as_strategy(generation_mode=mode), per_operation, valid=mode is right)
    return statuses


def _sent(server: Server, strategy: SearchStrategy[schemathesis.Case], count: int, *, valid: bool) -> list[int]:
    statuses: list[int] = []

    @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=strategy)
    def send(case: schemathesis.Case) -> None:
        if valid and isinstance(case.body, dict):
            case.body |= {"model": server.model, "max_tokens": 2}  # past the first two checks
        statuses.append(case.call(timeout=60).status_code)

    send()
    return statuses


def measure_killed(case: str, server: Server, width: int, num_tokens: int) -> list[Figure]:
    """Kill the engine's process under load; every stream must be told, and the server come back by itself."""
    expected = alone(server, prompts(4), num_tokens)

    async def load() -> list[str | BaseException]:
        task = asyncio.create_task(ask_all(server, prompts(width), 400))
        await asyncio.to_thread(until, lambda: server.gauge("requests_running") >= 2, "requests that run")
        server.engine().kill()
        return await task

    texts = asyncio.run(load())
    told = sum(isinstance(text, openai.APIError) for text in texts)
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": server.model, "prompt": "a"}, timeout=60)
    seconds = until(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 200, "recovery")
    return [
        Figure(case, "streams_told_of_the_kill", told, "requests", n=width),
        Figure(case, "streams_that_ended_before", sum(isinstance(text, str) for text in texts), "requests", n=width),
        Figure(case, "status_while_down", answer.status_code, "status", n=1),
        Figure(case, "retry_after_s", float(answer.headers.get("retry-after", "nan")), "s", n=1),
        Figure(case, "recovery_s", seconds, "s", n=1),
        Figure(case, "right_after_recovery", is_right(server, expected, num_tokens), "bool", n=4),
    ]


def make_releases(folder: Path) -> tuple[Path, Path]:
    """Run the pipeline on a tiny model, unless it ran in this folder; return the baseline's bundle and the optimized one's."""
    if not (folder / "project").is_dir():
        run_pipeline(folder)
    found = sorted(path.parent for path in (folder / "project").rglob("manifest.json") if path.parent.name.startswith("tiny-v"))
    if len(found) < 2:
        raise SystemExit(f"{len(found)} releases, not 2:\n{(folder / 'run.log').read_text()[-1500:]}")
    return found[0], found[1]


def run_pipeline(folder: Path) -> None:
    profile = write_project(folder / "project", write_tiny_llama(folder / "tiny"))
    command = [str(Path(sys.executable).with_name("model-optimizer")), "run", str(profile), "--json"]
    with (folder / "run.log").open("wb") as log:
        subprocess.run(command, cwd=folder / "project", stdout=log, stderr=log, check=False)


def measure_swaps(folder: Path, width: int, num_swaps: int) -> list[Figure]:
    """Let clients ask on and on while `current` moves; every answer must be one release's own, and none be lost."""
    releases, root = make_releases(folder), folder / "root"
    key = folder / "project" / "signer" / "key.pem.pub"
    unchecked = Checks(before=lambda _: Health("not looked at", 0, 0.0), after=lambda _: Health("not looked at", 0, 0.0))
    for release in releases[::-1]:
        deploy(release, root, WHY, public_key=key, checks=unchecked)
    with serving(root, f"public_key: {key}\nwatch_s: 0.1\nlimits: {{max_waiting: 500}}\n", folder) as server:
        known = {}
        for _ in releases:
            known[server_release(server)] = alone(server, prompts(4), SWAP_TOKENS)
            move(server, root, releases)
        seen, failed = asyncio.run(_load_while_moving(server, lambda: move(server, root, releases), width, num_swaps))
    owners = [{name for name, texts in known.items() if text == texts[number]} for number, text in seen]
    return [
        Figure("swap", "requests_lost", len(failed), "requests", n=len(seen) + len(failed)),
        Figure("swap", "answers_of_no_release", sum(not names for names in owners), "requests", n=len(seen)),
        Figure("swap", "answers_of_one_release_alone", sum(len(names) == 1 for names in owners), "requests", n=len(seen)),
        Figure("swap", "swaps_under_load", num_swaps, "swaps", n=width),
        Figure("swap", "releases_served", len(known), "releases", n=len(seen)),
    ]


def move(server: Server, root: Path, releases: tuple[Path, Path]) -> None:
    """Let `current` point to the other release and wait until the server has followed."""
    count = server.gauge('swaps_total{result="done"}')
    (other,) = {release.name for release in releases} - {server_release(server)}
    rollback(root, WHY, other)
    until(lambda: server.gauge('swaps_total{result="done"}') > count, "a swap")


async def _load_while_moving(
    server: Server, swap: Callable[[], None], width: int, num_swaps: int
) -> tuple[list[tuple[int, str]], list[openai.APIError]]:
    """Return every answer with its prompt's number, and every fault."""
    seen: list[tuple[int, str]] = []
    failed: list[openai.APIError] = []
    done = asyncio.Event()

    async def ask_on(client: openai.AsyncOpenAI, number: int) -> None:
        while not done.is_set():
            try:
                seen.append((number, await ask(client, server.model, prompts(4)[number], SWAP_TOKENS)))
            except openai.APIError as error:
                failed.append(error)

    async def move_on() -> None:
        for _ in range(num_swaps):
            await asyncio.to_thread(swap)
            wanted = len(seen) + width
            await asyncio.to_thread(until, lambda wanted=wanted: len(seen) >= wanted, "answers after a swap")
        done.set()

    async with server.client() as client:
        await asyncio.gather(move_on(), *[ask_on(client, number % 4) for number in range(width)])
    return seen, failed


def server_release(server: Server) -> str:
    return str(httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["root"])


def measure_managed(engine: str, program: Path, model: Path, folder: Path, width: int) -> list[Figure]:
    """Streams, cancelled requests and a kill with another project's server behind ours."""
    own = {"vllm": "dtype: float32, arguments: [--enforce-eager], environment: {VLLM_CPU_OMP_THREADS_BIND: nobind}"}
    managed = f"managed: {{{', '.join([f'command: {program}', *filter(None, [own.get(engine)])])}}}"
    settings = f"engine: {engine}\n{managed}\nkv: {{max_batch: 8, max_model_len: 512}}\nlimits: {{max_waiting: {4 * width}}}\n"
    with serving(model, settings, folder) as server:
        started = [Figure(engine, "start_s", server.start_s, "s", n=1)]
        return started + [figure for measure in MEASURES.values() for figure in measure(engine, server, width, SWAP_TOKENS)]


MEASURES = {"streams": measure_streams, "cancel": measure_cancelled, "kill": measure_killed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="`tiny`, a directory, or a reference to resolve")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-2])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--per-operation", type=int, default=60, help="requests that schemathesis draws for each operation")
    parser.add_argument("--swaps", type=int, default=4)
    parser.add_argument("--releases", type=Path, help="a folder that a run of this benchmark left, to package nothing again")
    parser.add_argument("--vllm", type=Path, help="the program of an environment of its own")
    parser.add_argument("--llamacpp", type=Path, help="llama-server; the model's directory holds one GGUF file too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = write_tiny_llama(folder / "model") if asked.model == "tiny" else resolved(asked.model).absolute()
        figures: list[Figure] = []
        if set(asked.parts) & {*MEASURES, "malformed"}:
            limits = f"limits: {{max_waiting: {4 * asked.streams}}}"
            with serving(model, f"engine: native\nkv: {{max_batch: 16, max_model_len: 512}}\n{limits}\n", folder) as server:
                for part in [part for part in MEASURES if part in asked.parts]:
                    figures += MEASURES[part]("native", server, asked.streams, asked.tokens)
                if "malformed" in asked.parts:
                    figures += measure_malformed("native", server, asked.per_operation, asked.tokens)
        if "swap" in asked.parts:
            figures += measure_swaps(asked.releases or folder, asked.streams, asked.swaps)
        for engine, program in (("vllm", asked.vllm), ("llamacpp", asked.llamacpp)):
            if engine in asked.parts and program:
                figures += measure_managed(engine, program.absolute(), model, folder, min(16, asked.streams))
    append(__file__, figures, ("torch", "openai", "schemathesis"))


if __name__ == "__main__":
    main()
