"""Runs load against a server over HTTP: an open loop on an absolute schedule, or a closed one at a fixed concurrency.

In an open loop every request has a time at which it is due. It is sent then, however many others still run; where the
generator is late, the wait counts as latency, and the generator's own delay is kept beside it.
"""

import asyncio
import gc
import resource
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.connection_pool import ConnectionPool
from model_optimizer.measurement.events import StreamReader
from model_optimizer.measurement.http_client import Answer, Endpoint
from model_optimizer.measurement.samples import NEVER_NS, NS_PER_S, LoadSamples, RequestStatus
from model_optimizer.measurement.self_watch import GeneratorHealth, SelfWatch
from model_optimizer.measurement.timer import Alarm
from model_optimizer.measurement.token_count import TextCounter, count_tokens

_TICK_S = 0.05
_SWEEP_S = 0.02
_LEAD_NS = 20_000_000
"""Between setting up and the first request."""
_PREOPENED = 16
_AT_ONCE = 64
"""Requests sent before arrivals are looked at again, so that a generator which is behind does not stamp them late too."""
_SPARE_FILES = 64


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at fixed times, in ns after the start of the run [N], rising."""

    offsets_ns: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many requests in flight, until so many were sent or so much time has passed."""

    concurrency: int
    num_requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.num_requests, self.duration_s) if limit is not None]
        if self.concurrency < 1 or not limits or min(limits) <= 0:
            raise ConfigError(
                "a closed loop takes a concurrency of at least 1 and a number of requests or a duration above 0; "
                f"seen: {self.concurrency}, {self.num_requests} and {self.duration_s}"
            )


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One run. Request i sends `bodies[i % len(bodies)]`, a JSON object."""

    bodies: Sequence[bytes]
    arrivals: OpenLoop | ClosedLoop
    stream: bool
    timeout_s: float = 600.0
    """From the intended start; then the request has failed and its connection is closed."""
    counter: TextCounter | None = None
    """Counts tokens in the text of answers; left out, the server's usage record is taken."""
    max_connections: int | None = None
    """Left out: what the open-files limit leaves."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a run has done so far."""

    elapsed_s: float
    num_planned: int | None
    num_started: int
    num_finished: int
    """Failed ones included."""
    num_failed: int


class Observer(Protocol):
    """Is told twenty times a second how a run goes."""

    def tick(self, snapshot: Snapshot) -> bool:
        """Return whether the run shall end now; what is in flight is then cancelled."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What one run saw."""

    samples: LoadSamples
    prompt_tokens: NDArray[np.int64]
    """[N] as the server told; -1 where it did not."""
    reasons: Counter[str]
    """Failures by their reason."""
    first_fault: str
    """What the server said to the first request that failed; empty where none did or it said nothing."""
    health: GeneratorHealth
    num_events: int
    """Streamed events that carried text, of all requests."""
    stopped_early: bool


def run_load(endpoint: Endpoint, plan: LoadPlan, observer: Observer | None = None) -> LoadRun:
    """Run the load to its end and return every sample; requests that failed are among them.

    Raises:
        ConfigError: no bodies or no arrivals.
    """
    if not plan.bodies or (isinstance(plan.arrivals, OpenLoop) and not plan.arrivals.offsets_ns.size):
        raise ConfigError("a load run takes at least one body and one arrival; seen: none")
    return asyncio.run(_run(endpoint, plan, observer))


async def _run(endpoint: Endpoint, plan: LoadPlan, observer: Observer | None) -> LoadRun:
    limit = plan.max_connections or max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_FILES)
    pool = ConnectionPool(endpoint, limit)
    wanted = plan.arrivals.concurrency if isinstance(plan.arrivals, ClosedLoop) else _PREOPENED
    await pool.preopen(min(wanted, limit))
    gc.disable()  # a collection over many samples takes milliseconds; a run makes no cycles that grow
    driver = _Driver(endpoint, plan, pool)
    watch = SelfWatch(asyncio.get_running_loop())
    try:
        stopped = await _until_ended(driver, observer)
    finally:
        watch.close()
        gc.enable()
        driver.close()
        pool.close()
    return _outcome(driver.answers, plan, watch, num_waited=pool.num_waited, stopped=stopped)


async def _until_ended(driver: "_Driver", observer: Observer | None) -> bool:
    """Start the driver and wait for its end; return whether the observer ended it first."""
    loop, start_ns = asyncio.get_running_loop(), time.perf_counter_ns() + _LEAD_NS
    next_tick = loop.time() + _TICK_S
    driver.start(start_ns)
    while not driver.finished:
        await asyncio.sleep(_SWEEP_S)
        driver.expire(time.perf_counter_ns())
        if observer is not None and loop.time() >= next_tick:
            next_tick += _TICK_S
            if observer.tick(driver.snapshot((time.perf_counter_ns() - start_ns) / NS_PER_S)):
                driver.cancel(time.perf_counter_ns())
                return True
    return False


class _Driver:
    """Makes requests when they are due and keeps their answers in that order."""

    def __init__(self, endpoint: Endpoint, plan: LoadPlan, pool: ConnectionPool):
        self.answers: list[Answer] = []
        self._plan = plan
        self._pool = pool
        pool.ended = self._ended
        self._requests = [endpoint.request(body) for body in plan.bodies]
        self._open: deque[Answer] = deque()
        """The answers in the order of their starts; those that have ended leave when they come first."""
        self._timeout_ns = int(plan.timeout_s * NS_PER_S)
        self._num_finished = self._num_failed = 0
        self._alarm = Alarm(asyncio.get_running_loop(), self._dispatch_due)
        closed = plan.arrivals if isinstance(plan.arrivals, ClosedLoop) else None
        self._due_ns: list[int] = []
        self._num_planned = closed.num_requests if closed else None
        self._until_ns: int | None = None

    def start(self, start_ns: int) -> None:
        """Begin at `start_ns`."""
        arrivals = self._plan.arrivals
        if isinstance(arrivals, OpenLoop):
            self._due_ns = (arrivals.offsets_ns + start_ns).tolist()
            self._num_planned = len(self._due_ns)
            self._alarm.set(self._due_ns[0])
            return
        if arrivals.duration_s is not None:
            self._until_ns = start_ns + int(arrivals.duration_s * NS_PER_S)
        for _ in range(arrivals.concurrency):
            self._dispatch_next()

    @property
    def finished(self) -> bool:
        return not self._more() and self._num_finished == len(self.answers)

    def snapshot(self, elapsed_s: float) -> Snapshot:
        return Snapshot(elapsed_s, self._num_planned, len(self.answers), self._num_finished, self._num_failed)

    def expire(self, now_ns: int) -> None:
        """Fail what has had its time."""
        while self._open:
            first = self._open[0]
            if first.open:
                if now_ns - first.intended_ns < self._timeout_ns:
                    return
                self._give_up(first, RequestStatus.TIMEOUT, f"no end within {self._plan.timeout_s:g} s", now_ns)
            self._open.popleft()

    def cancel(self, now_ns: int) -> None:
        """Send no more and give up what is in flight."""
        self._num_planned, self._due_ns, self._until_ns = len(self.answers), self._due_ns[: len(self.answers)], now_ns
        for answer in self._open:
            if answer.open:
                self._give_up(answer, RequestStatus.CANCELLED, "", now_ns)

    def close(self) -> None:
        self._alarm.close()

    def _more(self) -> bool:
        """Return whether a further request will be sent."""
        if self._num_planned is not None and len(self.answers) >= self._num_planned:
            return False
        return self._until_ns is None or time.perf_counter_ns() < self._until_ns

    def _dispatch_due(self) -> None:
        due_ns, at = self._due_ns, len(self.answers)
        last = min(at + _AT_ONCE, len(due_ns))
        while at < last and due_ns[at] <= time.perf_counter_ns():
            self._dispatch(due_ns[at])
            at += 1
        if at < len(due_ns):
            self._alarm.set(due_ns[at])

    def _dispatch_next(self) -> None:
        if self._more():
            self._dispatch(time.perf_counter_ns())

    def _dispatch(self, intended_ns: int) -> None:
        plan = self._plan
        reader = StreamReader(keep=plan.counter is not None) if plan.stream else None
        answer = Answer(self._requests[len(self.answers) % len(self._requests)], intended_ns, reader)
        self.answers.append(answer)
        self._open.append(answer)
        self._pool.send(answer)

    def _give_up(self, answer: Answer, status: RequestStatus, reason: str, now_ns: int) -> None:
        self._pool.drop(answer)
        answer.end(status, reason, now_ns)
        self._ended(answer)

    def _ended(self, answer: Answer) -> None:
        self._num_finished += 1
        if answer.status != RequestStatus.OK:
            self._num_failed += 1
        elif self._plan.counter is None:
            answer.body = b""
        if isinstance(self._plan.arrivals, ClosedLoop):
            self._dispatch_next()


def samples_of(answers: Sequence[Answer], counter: TextCounter | None) -> LoadSamples:
    """Return the times and counts of answers, in the order of their intended starts."""
    times = [answer.reader.text_times_ns if answer.reader else [] for answer in answers]
    num_chunks = np.array([len(it) for it in times], dtype=np.int64)
    num_tokens, chunk_tokens = count_tokens(answers, counter)
    return LoadSamples(
        intended_ns=np.array([answer.intended_ns for answer in answers], dtype=np.int64),
        started_ns=np.array([answer.started_ns for answer in answers], dtype=np.int64),
        first_token_ns=np.array([it[0] if it else NEVER_NS for it in times], dtype=np.int64),
        finished_ns=np.array([answer.finished_ns for answer in answers], dtype=np.int64),
        num_tokens=num_tokens,
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_chunks, dtype=np.int64)]),
        token_times_ns=np.fromiter((time_ns for it in times for time_ns in it), dtype=np.int64, count=int(num_chunks.sum())),
        chunk_tokens=chunk_tokens,
        status=np.array([answer.status for answer in answers], dtype=np.int8),
    )


def _outcome(answers: Sequence[Answer], plan: LoadPlan, watch: SelfWatch, *, num_waited: int, stopped: bool) -> LoadRun:
    samples = samples_of(answers, plan.counter)
    faults = [answer for answer in answers if answer.reason]
    told = next((answer.body for answer in faults if answer.body), b"")
    return LoadRun(
        samples=samples,
        prompt_tokens=np.array([answer.used_prompt for answer in answers], dtype=np.int64),
        reasons=Counter(answer.reason for answer in faults),
        first_fault=" ".join(told.decode("utf-8", "replace").split())[:300],
        health=watch.judge(samples, num_waited),
        num_events=samples.token_times_ns.size,
        stopped_early=stopped,
    )
