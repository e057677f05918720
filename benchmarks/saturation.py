"""The native runtime at saturation for minutes: lost pages, outputs unlike those of a request alone, memory that grows.

    make bench NAME=saturation ARGS="--model DIRECTORY --minutes 10"

Every request of a fixed set first runs alone. Then twice as many as may run are kept in flight, in seeded random order, one in
fifty cancelled in mid-run, in a pool too small for all of them, so that requests are preempted. Half of them begin alike and
share prefixes. Every ten seconds memory and pool are read; at the end everything drains.
"""

import argparse
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch

from benchmarks.evidence import Figure, append
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.protocols import GenerationRequest, RequestId
from model_optimizer.runtimes.torch.config import NativeOptions, read_model_config
from model_optimizer.runtimes.torch.engine import NativeRuntime, open_native

SEED = 0
PAGE_TOKENS = 16
MAX_MODEL_LEN = 384
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_RANGE = 96, 0.6, (8, 256)
NEW_TOKENS_RANGE = (32, 128)
SHARED_TOKENS = 48
POOL_SHARE = 0.3
"""Pages for this share of what all streams need at their full length."""
CANCEL_SHARE = 0.02
READ_EVERY_S = 10.0
WARM_SHARE = 0.2
"""Of the readings, not compared: allocators fill their caches at first."""


@dataclass(frozen=True)
class Reading:
    at_s: float
    gpu_bytes: int
    """Reserved by the allocator; 0 on a CPU."""
    rss_bytes: int
    num_used: int


@dataclass
class Tally:
    num_done: int = 0
    num_tokens: int = 0
    num_cancelled: int = 0
    num_different: int = 0
    readings: list[Reading] = field(default_factory=list)


def draw_requests(vocab_size: int, num: int) -> list[GenerationRequest]:
    generator = np.random.default_rng(SEED)
    shared = tuple(generator.integers(0, vocab_size, SHARED_TOKENS).tolist())
    found = []
    for at in range(num):
        length = int(np.clip(PROMPT_MEDIAN * np.exp(PROMPT_SIGMA * generator.standard_normal()), *PROMPT_RANGE))
        own = tuple(generator.integers(0, vocab_size, length).tolist())
        new_tokens = int(generator.integers(*NEW_TOKENS_RANGE))
        is_shared = at % 2 == 0
        found.append(GenerationRequest((shared + own) if is_shared else own, new_tokens, shares_prefix=is_shared))
    return found


def digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()


def alone(runtime: NativeRuntime, request: GenerationRequest) -> str:
    """Return the digest of a request that runs by itself, without a prefix of others."""
    runtime.submit(GenerationRequest(request.prompt, request.max_new_tokens))
    tokens: list[int] = []
    while events := runtime.step():
        tokens += [event.token for event in events]
    return digest(tokens)


class Load:
    """Keeps `num_in_flight` requests submitted, and compares what comes back."""

    def __init__(
        self, runtime: NativeRuntime, requests: Sequence[GenerationRequest], expected: Sequence[str], num_in_flight: int
    ):
        self.tally = Tally()
        self._runtime = runtime
        self._requests = requests
        self._expected = expected
        self._num_in_flight = num_in_flight
        self._generator = np.random.default_rng(SEED + 1)
        self._tokens: dict[RequestId, list[int]] = {}
        self._index: dict[RequestId, int] = {}

    def fill(self) -> None:
        while len(self._index) < self._num_in_flight:
            at = int(self._generator.integers(len(self._requests)))
            identity = self._runtime.submit(self._requests[at])
            self._index[identity], self._tokens[identity] = at, []

    def step(self) -> None:
        num_cancels = 0
        for event in self._runtime.step():
            self._tokens[event.request].append(event.token)
            self.tally.num_tokens += 1
            if event.finished:
                at, tokens = self._index.pop(event.request), self._tokens.pop(event.request)
                self.tally.num_done += 1
                self.tally.num_different += digest(tokens) != self._expected[at]
                num_cancels += self._generator.random() < CANCEL_SHARE
        for _ in range(min(num_cancels, len(self._index))):
            self._cancel_one()

    def drain(self) -> None:
        while self._index:
            self.step()

    def read(self, at_s: float) -> None:
        reserved = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        rss, used = psutil.Process().memory_info().rss, self._runtime.activity().pool.num_used
        self.tally.readings.append(Reading(at_s, reserved, rss, used))

    def _cancel_one(self) -> None:
        identity = list(self._index)[int(self._generator.integers(len(self._index)))]
        self._runtime.cancel(identity)
        del self._index[identity], self._tokens[identity]
        self.tally.num_cancelled += 1


def growth(values: Sequence[int]) -> float:
    """Return the mean of the last third of the readings over that of the first third after the warm part, less 1."""
    settled = np.asarray(values[int(WARM_SHARE * len(values)) :], dtype=float)
    third = max(1, len(settled) // 3)
    return float(settled[-third:].mean() / settled[:third].mean() - 1) if settled[:third].mean() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=48)
    asked = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False  # sums of other shapes then differ in the last float32 bits alone
    num_pages = int(POOL_SHARE * asked.streams * MAX_MODEL_LEN / PAGE_TOKENS)
    plan = KvPlan(
        page_tokens=PAGE_TOKENS, num_pages=num_pages, bytes_per_token=1, max_batch=asked.streams, max_model_len=MAX_MODEL_LEN
    )
    runtime = open_native(asked.model, plan, NativeOptions())
    requests = draw_requests(read_model_config(asked.model).shape.vocab_size, asked.requests)
    expected = [alone(runtime, request) for request in requests]
    print(f"{len(requests)} requests ran alone", flush=True)
    load, start, read_at = Load(runtime, requests, expected, 2 * asked.streams), time.monotonic(), 0.0
    while (passed := time.monotonic() - start) < 60 * asked.minutes:
        load.fill()
        load.step()
        if passed >= read_at:
            load.read(passed)
            read_at += READ_EVERY_S
    wall_s = time.monotonic() - start
    load.drain()
    pool, tally = runtime.activity().pool, load.tally
    case, said = f"{asked.streams}-streams-{asked.model.name}", f"make bench NAME=saturation; {wall_s:.0f} s"
    on_gpu = torch.cuda.is_available()
    figures = [
        Figure(case, "saturated_s", wall_s, "s", reason=said),
        Figure(case, "requests_count", tally.num_done, "count", reason=said),
        Figure(case, "tok_per_s", tally.num_tokens / wall_s, "tok/s", n=tally.num_tokens, reason=said),
        Figure(case, "different_outputs_count", tally.num_different, "count", n=tally.num_done, reason=said),
        Figure(case, "cancelled_count", tally.num_cancelled, "count", reason=said),
        Figure(case, "preemptions_count", runtime.activity().num_preemptions, "count", reason=said),
        Figure(case, "leaked_pages_count", pool.num_used, "count", n=pool.num_pages, reason=said),
        Figure(case, "most_used_pages_count", max(it.num_used for it in tally.readings), "count", n=pool.num_pages, reason=said),
        Figure(
            case, "rss_growth_ratio", growth([it.rss_bytes for it in tally.readings]), "ratio", n=len(tally.readings), reason=said
        ),
    ]
    if on_gpu:
        grown = growth([it.gpu_bytes for it in tally.readings])
        figures.append(Figure(case, "gpu_reserved_growth_ratio", grown, "ratio", n=len(tally.readings), reason=said))
    append(__file__, figures, ("torch", "transformers"))


if __name__ == "__main__":
    main()
