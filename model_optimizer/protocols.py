"""The seams of the engine: what a runtime is, how progress is told, and the data that crosses them.

A package that needs something above it takes it as an argument typed here; tasks and the command
line pass it in.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NewType, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import Strategy

T = TypeVar("T")
RequestId = NewType("RequestId", int)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences to score together. `score_from[i]` >= 1 is the first position of sequence i to score."""

    tokens: tuple[tuple[int, ...], ...]
    score_from: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Teacher-forced scores of one sequence, float32 and bool of length T - score_from."""

    log_probs: NDArray[np.float32]
    """log p(token[t] | token[:t]) in nats."""
    is_greedy: NDArray[np.bool_]
    """Whether token[t] was the most likely one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: the likeliest at temperature 0, else a draw that depends on seed and position alone."""

    temperature: float = 0.0
    """Divides the logits; 0 .. 100."""
    top_k: int = 0
    """Draw from the k likeliest; 0 = from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities reach this sum; (0, 1]."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Generation of at most `max_new_tokens` tokens, greedy by default; a stop token ends it and is its last event."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_tokens: tuple[int, ...] = ()
    sampling: Sampling = Sampling()
    num_top: int = 0
    """How many of the likeliest tokens each event tells beside the chosen one."""
    shares_prefix: bool = False
    """Whether keys and values may be shared with requests that begin alike and allow it too, now and later. Measurements
    leave it off, so that no round is helped by the one before."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token; `time_ns` is `time.perf_counter_ns()` when it was known."""

    request: RequestId
    token: int
    log_prob: float
    """In nats, of the model's own distribution: before temperature, top-k and top-p."""
    time_ns: int
    finished: bool
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability) of the `num_top` likeliest, best first."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes held by a runtime: its weights as resident, its KV cache now, and the process."""

    weight_bytes: int
    kv_bytes: int
    """Keys and values of the requests that run now."""
    process_bytes: int
    pool_bytes: int = 0
    """What is set aside for keys and values whether requests run or not; 0 where nothing is."""


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """What an opened runtime is."""

    name: str
    version: str
    device: str
    precision: str
    max_batch: int
    max_model_len: int
    notes: tuple[str, ...] = ()
    """e.g. that int8 weights were unpacked to float32 at load."""


@dataclass(frozen=True, slots=True)
class Support:
    """Yes, or no with the reason."""

    supported: bool
    reason: str = ""


class Runtime(Protocol):
    """One loaded engine, used from one thread."""

    @property
    def facts(self) -> RuntimeFacts: ...
    def score(self, batch: TokenBatch) -> list[TokenLogProbs]:
        """Return teacher-forced log-probabilities, one entry per sequence, independent of batch mates."""

    def submit(self, request: GenerationRequest) -> RequestId:
        """Queue a request.

        Raises:
            ConfigError: the prompt is empty or prompt + max_new_tokens exceeds max_model_len.
        """

    def step(self) -> list[TokenEvent]:
        """Admit what fits, decode one token for every running request; [] when idle."""

    def cancel(self, request: RequestId) -> None:
        """Drop a request and free its cache; unknown or finished ids are ignored."""

    def memory(self) -> MemoryReading: ...
    def close(self) -> None: ...


class LogitsRuntime(Runtime, Protocol):
    """A runtime that also gives full logits."""

    def logits(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        """Return logits of one sequence, float32 [T, vocab]."""


class RuntimeFactory(Protocol):
    """How a runtime of one kind is opened."""

    def supports(self, strategy: Strategy) -> Support: ...
    def open(self, engine: Engine, directory: Path, memory: KvPlan) -> LogitsRuntime:
        """Load the engine that lies in `directory`.

        Raises:
            UnsupportedError: the framework is missing or has another version than the engine's.
        """


class ScaleStore(Protocol):
    """Where the input ranges of a warmed-up process wait for the next one. Losing it costs a warm-up, never a request."""

    def read(self, key: str) -> dict[str, float] | None:
        """Return layer -> range; None where there is none, where it has expired, or (with a warning) where the store fails."""

    def write(self, key: str, ranges: Mapping[str, float]) -> None:
        """Keep layer -> range for the store's time to live; a store that fails is warned of."""


class Progress(Protocol):
    """How the engine tells what it is doing; bars in a terminal, lines in CI, artifacts in Prefect."""

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """Yield the items while showing how many of `total` are done."""

    def note(self, message: str) -> None:
        """Tell one fact."""


class Quiet:
    """A Progress that shows nothing."""

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        yield from items

    def note(self, message: str) -> None:
        pass
