"""A `LogitsRuntime` over a managed server: it batches and keeps the cache, here its streams become token events."""

import contextlib
import itertools
import json
import math
import queue
import secrets
import shutil
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.errors import UnsupportedError
from model_optimizer.protocols import (
    GenerationRequest,
    MemoryReading,
    RequestId,
    RuntimeFacts,
    Support,
    TokenBatch,
    TokenEvent,
    TokenLogProbs,
)
from model_optimizer.runtimes.faults import RequestFault
from model_optimizer.runtimes.limits import check_request
from model_optimizer.runtimes.managed.dialect import Dialect, Heard, Launch, Scored, encode
from model_optimizer.runtimes.managed.process import ManagedProcess, free_port, get
from model_optimizer.runtimes.managed.spelling import held_tokens, read_spellings
from model_optimizer.runtimes.managed.stream import Broken, Inbox, News, Refused, TokenStream
from model_optimizer.runtimes.options import ManagedOptions, RuntimeOptions

_ANY_VOCABULARY = 2**31
_REFUSALS = (400, 404, 413, 422)
"""Statuses that say that the request itself is at fault."""
_LAST_BREATH_S = 0.5
"""For a server that broke a connection to end, which makes it a crash."""


@dataclass(slots=True)
class _Open:
    """One request that runs."""

    request: GenerationRequest
    stream: TokenStream
    num_generated: int = 0


class ManagedRuntime:
    """Used from one thread; every request has a thread of its own that reads.

    Law: an event comes for every token, the last of a request is `finished`, and a cancelled request gives none.
    """

    def __init__(self, process: ManagedProcess, dialect: Dialect, launch: Launch, facts: RuntimeFacts, weight_bytes: int):
        self._process = process
        self._dialect = dialect
        self._launch = launch
        self._facts = facts
        self._weight_bytes = weight_bytes
        self._vocab_size = _vocab_size(launch.model)
        self._ids = itertools.count()
        self._open: dict[RequestId, _Open] = {}
        self._inbox: Inbox = queue.SimpleQueue()
        self._faults: deque[RequestFault] = deque()
        self._spellings: dict[bytes, int] | None = None

    @property
    def facts(self) -> RuntimeFacts:
        return self._facts

    def submit(self, request: GenerationRequest) -> RequestId:
        """Send a request.

        Raises:
            ConfigError: the prompt is empty, holds unknown tokens, or is too long with what it asks for.
        """
        check_request(request, self._launch.plan, self._vocab_size)
        identity = RequestId(next(self._ids))
        stream = TokenStream(identity, self._dialect, self._launch.port, self._inbox)
        stream.start(encode(self._dialect.body(request)), self._launch.key)
        self._open[identity] = _Open(request, stream)
        return identity

    def step(self) -> list[TokenEvent]:
        """Wait for the next tokens of any request and return all that have come; [] when idle.

        Raises:
            RequestFault: the server did not answer one request; the others go on.
            RuntimeError: the server has ended.
        """
        self._process.check()
        events: list[TokenEvent] = []
        while self._open and not events and not self._faults:
            self._hear(*self._inbox.get(), events)
        with contextlib.suppress(queue.Empty):
            while not self._faults:
                self._hear(*self._inbox.get_nowait(), events)
        if self._faults and not events:
            raise self._faults.popleft()
        return events

    def cancel(self, request: RequestId) -> None:
        """Close a request's connection; unknown or finished ids are ignored."""
        if (running := self._open.pop(request, None)) is not None:
            running.stream.cancel()

    def memory(self) -> MemoryReading:
        """Return the stored weights, keys and values as counted by tokens, the processes' size, and the plan's pool."""
        plan = self._launch.plan
        num_tokens = sum(len(it.request.prompt) + it.num_generated for it in self._open.values())
        return MemoryReading(
            self._weight_bytes, num_tokens * plan.bytes_per_token, self._process.resident_bytes(), plan.pool_bytes
        )

    def close(self) -> None:
        """Drop every request and end the server."""
        for identity in list(self._open):
            self.cancel(identity)
        self._process.end()

    def score(self, batch: TokenBatch) -> list[TokenLogProbs]:
        """Raise UnsupportedError."""
        self._refuse("scores of given tokens")

    def logits(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        """Raise UnsupportedError."""
        self._refuse("full logits")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(f"{self._facts.name} is only asked for answers here, not for {what}; measure with torch")

    def _hear(self, identity: RequestId, news: News, events: list[TokenEvent]) -> None:
        """Add a request's next events; its fault waits until the events before it are told."""
        running = self._open.get(identity)
        if running is None:
            return
        try:
            if isinstance(news, Heard):
                events += self._events(identity, running, news)
            else:
                self._fail(identity, news)
        except RequestFault as fault:
            self._faults.append(fault)

    def _fail(self, identity: RequestId, news: Refused | Broken) -> NoReturn:
        del self._open[identity]
        if isinstance(news, Refused):
            message = f"{self._facts.name} answered {news.status}: {news.message}"
            raise RequestFault(identity, message, refused=news.status in _REFUSALS)
        deadline = time.monotonic() + _LAST_BREATH_S
        while not self._process.has_ended and time.monotonic() < deadline:
            time.sleep(0.05)
        self._process.check()
        raise RequestFault(identity, f"{self._facts.name} broke the connection: {news.message}", refused=False)

    def _events(self, identity: RequestId, running: _Open, heard: Heard) -> list[TokenEvent]:
        """Return a request's next events, the last of which is a stop token or the last one that was asked for."""
        request, now = running.request, time.perf_counter_ns()
        tokens = [*self._held_back(identity, running, heard), *heard.tokens]
        if heard.stopped_at is not None and request.stop_tokens:
            stop = heard.stopped_at if heard.stopped_at in request.stop_tokens else request.stop_tokens[0]
            tokens.append(Scored(stop, math.nan))
        events = []
        for token in tokens:
            running.num_generated += 1
            finished = token.token in request.stop_tokens or running.num_generated >= request.max_new_tokens
            events.append(TokenEvent(identity, token.token, token.log_prob, now, finished, token.top))
            if finished:
                break
        ended_well = bool(events) and events[-1].finished
        if ended_well or heard.ended:
            del self._open[identity]
            if not heard.ended:
                running.stream.cancel()
        if heard.ended and not ended_well:
            message = f"{self._facts.name} ended an answer after {running.num_generated} tokens, at no stop token"
            raise RequestFault(identity, message, refused=False)
        return events

    def _held_back(self, identity: RequestId, running: _Open, heard: Heard) -> list[Scored]:
        """Return the tokens before those told that the server kept until their character was whole; it scores none of them.

        Raises:
            RequestFault: what was told does not say which they are.
        """
        missing = (heard.num_generated or 0) - running.num_generated - len(heard.tokens)
        if missing <= 0 or not heard.tokens:
            return []
        if self._spellings is None:
            directory = self._launch.model if self._launch.model.is_dir() else self._launch.model.parent
            self._spellings = read_spellings(directory)
        found = held_tokens(heard.spelled, heard.tokens[-1].token, missing, self._spellings)
        if found is None:
            del self._open[identity]
            running.stream.cancel()
            message = f"{self._facts.name} held back {missing} tokens of {heard.spelled!r} and they do not follow from it"
            raise RequestFault(identity, message, refused=False)
        return [Scored(token, math.nan) for token in found]


class ManagedFactory:
    """Start a server of one dialect and open it as a runtime."""

    section = "managed"

    def __init__(self, dialect: Dialect, options: ManagedOptions | None = None):
        self._dialect = dialect
        self._options = options or ManagedOptions()

    def tuned(self, options: RuntimeOptions) -> "ManagedFactory":
        return ManagedFactory(self._dialect, options.managed)

    def supports(self, strategy: Strategy) -> Support:
        name = self._dialect.name
        return Support(False, f"{name} is no target of compile here; `engine: {name}` in serve.yaml serves a bundle with it")

    def open(self, engine: Engine, directory: Path, memory: KvPlan) -> ManagedRuntime:
        """Start the server and wait until it answers.

        Raises:
            UnsupportedError: the program is not there, or it does not start.
            ConfigError: the directory holds nothing that it loads.
        """
        dialect, options = self._dialect, self._options
        program = find_program(dialect, options)
        launch = Launch(program, dialect.find_model(directory), memory, options, free_port(), secrets.token_urlsafe(24))
        environment = {**dialect.environment(launch), **options.environment}
        process = ManagedProcess((*dialect.command(launch), *options.arguments), environment, options.log)
        try:
            process.wait_until_ready(launch.port, "/health", options.start_timeout_s)
            version = dialect.version(get(launch.port, dialect.version_path, launch.key)[1])
        except BaseException:
            process.end()
            raise
        facts = RuntimeFacts(
            dialect.name,
            version,
            "the device that it chose",
            options.dtype,
            memory.max_batch,
            memory.max_model_len,
            (f"{program} in a process of its own (pid {process.pid})",),
        )
        return ManagedRuntime(process, dialect, launch, facts, engine.num_bytes)


def find_program(dialect: Dialect, options: ManagedOptions) -> Path:
    """Return the program that was named, or the one in PATH.

    Raises:
        UnsupportedError: there is none; says how it is had.
    """
    if options.command is not None:
        if not options.command.expanduser().is_file():
            raise UnsupportedError(f"managed.command {options.command} is no file; {dialect.install}")
        return options.command.expanduser().absolute()
    found = shutil.which(dialect.program)
    if found is None:
        raise UnsupportedError(f"{dialect.program} is not in PATH; {dialect.install}, and name it in managed.command")
    return Path(found)


def _vocab_size(model: Path) -> int:
    """Return what config.json states; where there is none, the server is the judge of tokens."""
    path = (model if model.is_dir() else model.parent) / "config.json"
    stated = json.loads(path.read_bytes()).get("vocab_size") if path.is_file() else None
    return stated if isinstance(stated, int) else _ANY_VOCABULARY
