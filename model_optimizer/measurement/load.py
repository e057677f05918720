"""Closed-loop load: a fixed number of requests in flight on a Runtime, every token time-stamped.

In a closed loop the intended start of a request is its actual start: the next one is submitted the moment
that one finishes, so there is no hidden waiting time (the open loop belongs to the server benchmark).

Shapes: N requests submitted, M tokens generated in all.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError
from model_optimizer.protocols import GenerationRequest, RequestId, Runtime, TokenEvent

NS_PER_MS = 1e6
NS_PER_S = 1e9
FAILED_NS = -1
"""Stands for a time that never came: a failed request has no end."""


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """What one closed-loop run saw; request i owns the tokens `offsets[i]:offsets[i + 1]` of the flat arrays."""

    concurrency: int
    submitted_ns: NDArray[np.int64]
    """[N] `time.perf_counter_ns()`, intended and actual start in one."""
    first_token_ns: NDArray[np.int64]
    """[N]; -1 where no token came."""
    finished_ns: NDArray[np.int64]
    """[N]; -1 for a failed request."""
    num_tokens: NDArray[np.int64]
    """[N]"""
    offsets: NDArray[np.int64]
    """[N + 1]"""
    token_times_ns: NDArray[np.int64]
    """[M]"""
    tokens: NDArray[np.int64]
    """[M] token ids."""
    log_probs: NDArray[np.float32]
    """[M] in nats."""
    failed: NDArray[np.bool_]
    """[N] refused at submit, or never finished though the runtime went idle."""

    @property
    def num_requests(self) -> int:
        return len(self.submitted_ns)

    @property
    def num_failed(self) -> int:
        return int(self.failed.sum())

    @property
    def num_non_finite(self) -> int:
        """Count generated tokens whose log-probability is NaN or infinite."""
        return int((~np.isfinite(self.log_probs)).sum())

    def tokens_of(self, request: int) -> tuple[int, ...]:
        """Return the token ids that request `request` produced."""
        return tuple(int(token) for token in self.tokens[self.offsets[request] : self.offsets[request + 1]])

    def wall_s(self) -> float:
        """Return the time from the first submission to the last token; 0 where nothing was generated."""
        return float(self.token_times_ns.max() - self.submitted_ns.min()) / NS_PER_S if self.token_times_ns.size else 0.0

    def output_tok_per_s(self) -> float:
        """Return generated tokens over the whole run, prefill and draining included."""
        return self.token_times_ns.size / self.wall_s() if self.token_times_ns.size else 0.0

    def decode_tok_per_s(self) -> float:
        """Return tokens after each request's first, over the time in which any request was past its first token.

        With one batch of equal prompts this is the pure decode rate; in a refilled loop the prefill of newcomers
        stalls the others and counts, as it does for a user.
        """
        done = self.num_tokens > 1
        starts, ends = self.first_token_ns[done], self._last_token_ns()[done]
        decode_ns = _covered_ns(starts, ends)
        return float((self.num_tokens[done] - 1).sum()) * NS_PER_S / decode_ns if decode_ns else 0.0

    def requests_per_s(self) -> float:
        """Return finished requests over the whole run."""
        wall_s = self.wall_s()
        return float((~self.failed).sum()) / wall_s if wall_s else 0.0

    def end_to_end_ms(self) -> NDArray[np.float64]:
        """Return submission to last token per request that finished."""
        ok = ~self.failed
        return np.asarray((self.finished_ns[ok] - self.submitted_ns[ok]) / NS_PER_MS, dtype=np.float64)

    def ttft_ms(self) -> NDArray[np.float64]:
        """Return submission to first token per request that finished."""
        ok = ~self.failed
        return np.asarray((self.first_token_ns[ok] - self.submitted_ns[ok]) / NS_PER_MS, dtype=np.float64)

    def itl_ms(self) -> NDArray[np.float64]:
        """Return every gap between neighbouring tokens of one request, all requests in a row."""
        gaps = np.diff(self.token_times_ns)
        within = np.ones(gaps.shape, dtype=bool)
        borders = self.offsets[1:-1] - 1
        within[borders[(borders >= 0) & (borders < gaps.size)]] = False
        return np.asarray(gaps[within] / NS_PER_MS, dtype=np.float64)

    def _last_token_ns(self) -> NDArray[np.int64]:
        last = np.full(self.num_requests, FAILED_NS, dtype=np.int64)
        some = self.num_tokens > 0
        last[some] = self.token_times_ns[self.offsets[1:][some] - 1]
        return last


def _covered_ns(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """Return the length of the union of the intervals."""
    covered, reached = 0, -1
    for start, end in sorted(zip(starts.tolist(), ends.tolist(), strict=True)):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


@dataclass(slots=True)
class _Flight:
    """One request while it runs."""

    submitted_ns: int
    events: list[TokenEvent] = field(default_factory=list)
    finished_ns: int = FAILED_NS


def run_closed_loop(
    runtime: Runtime, requests: Sequence[GenerationRequest], concurrency: int, *, deadline_ns: int | None = None
) -> LoadRecord:
    """Run the requests in order with `concurrency` of them in flight until all have ended.

    After `deadline_ns` (`time.perf_counter_ns()`) no further request is submitted; those in flight finish, and the
    record holds only what was submitted. A request that the runtime refuses, or that it never finishes, is failed.

    Raises:
        ConfigError: no requests, or a concurrency below 1.
    """
    if not requests or concurrency < 1:
        raise ConfigError(
            f"a load run takes at least one request and a concurrency of at least 1; seen: {len(requests)}, {concurrency}"
        )
    waiting, flights = deque(requests), list[_Flight]()
    running: dict[RequestId, _Flight] = {}
    while waiting or running:
        while waiting and len(running) < concurrency and (deadline_ns is None or time.perf_counter_ns() < deadline_ns):
            flight = _Flight(submitted_ns=time.perf_counter_ns())
            flights.append(flight)
            try:
                running[runtime.submit(waiting.popleft())] = flight
            except ConfigError:  # refused, e.g. longer than max_model_len: a failed request, not the end of the run
                continue
        if not running:
            break
        if not (events := runtime.step()):
            break  # idle although requests are open: what is left has failed
        for event in events:
            if owner := running.get(event.request):
                owner.events.append(event)
                if event.finished:
                    owner.finished_ns = event.time_ns
                    del running[event.request]
    for request in running:
        runtime.cancel(request)
    return _record(flights, concurrency)


def _record(flights: Sequence[_Flight], concurrency: int) -> LoadRecord:
    events = [event for flight in flights for event in flight.events]
    num_tokens = np.array([len(flight.events) for flight in flights], dtype=np.int64)
    first = [flight.events[0].time_ns if flight.events else FAILED_NS for flight in flights]
    finished = np.array([flight.finished_ns for flight in flights], dtype=np.int64)
    return LoadRecord(
        concurrency=concurrency,
        submitted_ns=np.array([flight.submitted_ns for flight in flights], dtype=np.int64),
        first_token_ns=np.array(first, dtype=np.int64),
        finished_ns=finished,
        num_tokens=num_tokens,
        offsets=np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int64),
        token_times_ns=np.array([event.time_ns for event in events], dtype=np.int64),
        tokens=np.array([event.token for event in events], dtype=np.int64),
        log_probs=np.array([event.log_prob for event in events], dtype=np.float32),
        failed=finished == FAILED_NS,
    )


def join(records: Sequence[LoadRecord]) -> LoadRecord:
    """Return one record of several runs of the same concurrency; rates over it would count the pauses between the runs."""
    offsets, total = [np.zeros(1, dtype=np.int64)], 0
    for record in records:
        offsets.append(record.offsets[1:] + total)
        total += record.token_times_ns.size
    return LoadRecord(
        concurrency=records[0].concurrency,
        submitted_ns=np.concatenate([record.submitted_ns for record in records]),
        first_token_ns=np.concatenate([record.first_token_ns for record in records]),
        finished_ns=np.concatenate([record.finished_ns for record in records]),
        num_tokens=np.concatenate([record.num_tokens for record in records]),
        offsets=np.concatenate(offsets),
        token_times_ns=np.concatenate([record.token_times_ns for record in records]),
        tokens=np.concatenate([record.tokens for record in records]),
        log_probs=np.concatenate([record.log_probs for record in records]),
        failed=np.concatenate([record.failed for record in records]),
    )
