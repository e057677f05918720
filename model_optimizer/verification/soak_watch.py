"""A runtime under watch: every token's time, and, where the native runtime tells, whose pages are whose.

Knows no load and no verdict; it counts, and keeps the first finding in words.
"""

import math
import time

import numpy as np

from model_optimizer.artifacts.verification import Tally
from model_optimizer.protocols import (
    GenerationRequest,
    MemoryReading,
    RequestId,
    Runtime,
    RuntimeFacts,
    TokenBatch,
    TokenEvent,
    TokenLogProbs,
)
from model_optimizer.runtimes.torch.engine import Activity, NativeRuntime
from model_optimizer.verification.soak_records import Check

POOL_EVERY_STEPS = 32
"""The pool is looked at so often; it takes time in proportion to its pages."""
NATS_TOLERANCE, MOST_NATS_TOLERANCE = 0.02, 0.5
"""A token's log-probability as generated may differ so far from the one scored afterwards, without pages or batch mates: by
four times what the process's first requests differ by, within these bounds. Float32 on a CPU differs by 1e-5, rounded inputs
by more; a foreign page gives whole nats."""
NUM_USUAL, USUAL_FACTOR = 8, 4


class Watched:
    """Passes everything on to `inner` and looks at what comes back."""

    def __init__(self, inner: Runtime):
        self._inner = inner
        self._times: dict[RequestId, int] = {}
        self._num_steps = self._num_non_finite = 0
        self._usual_nats: list[float] = []
        self._checked: dict[Check, int] = {}
        self._found: dict[Check, int] = {}
        self._first: dict[Check, str] = {}

    @property
    def facts(self) -> RuntimeFacts:
        return self._inner.facts

    def submit(self, request: GenerationRequest) -> RequestId:
        begun_ns = time.perf_counter_ns()
        identity = self._inner.submit(request)
        self._times[identity] = begun_ns
        return identity

    def step(self) -> list[TokenEvent]:
        events = self._inner.step()
        now_ns = time.perf_counter_ns()
        for event in events:
            self._check_time(event, now_ns)
            self._num_non_finite += not math.isfinite(event.log_prob)
        self._num_steps += 1
        if self._num_steps % POOL_EVERY_STEPS == 0:
            self.check_pool(idle=False)
        return events

    def cancel(self, request: RequestId) -> None:
        self._times.pop(request, None)
        self._inner.cancel(request)

    def score(self, batch: TokenBatch) -> list[TokenLogProbs]:
        return self._inner.score(batch)

    def memory(self) -> MemoryReading:
        return self._inner.memory()

    def close(self) -> None:
        self._inner.close()

    def num_preemptions(self) -> int:
        """Return how many requests gave way so far; 0 where the runtime does not tell."""
        activity = self._activity()
        return activity.num_preemptions if activity else 0

    def take_non_finite(self) -> int:
        """Return how many tokens had a log-probability that is NaN or infinite since the last call."""
        count, self._num_non_finite = self._num_non_finite, 0
        return count

    def check_pool(self, *, idle: bool) -> None:
        """Make sure that free, used and cached pages are all pages, that nothing is shared, and when idle nothing is held."""
        activity = self._activity()
        if activity is None:
            return
        pool = activity.pool
        counted = pool.num_free + pool.num_used + pool.num_cached
        faults = []
        if counted != pool.num_pages:
            faults.append(
                f"{pool.num_free} free + {pool.num_used} used + {pool.num_cached} cached pages are not all {pool.num_pages}"
            )
        if pool.num_shared:
            faults.append(f"{pool.num_shared} pages are used by several requests, none of which shares its prefix")
        if idle and (pool.num_used or pool.num_sequences):
            faults.append(f"{pool.num_used} pages are held by {pool.num_sequences} sequences though no request is in flight")
        self.count(Check.PAGE_FAULTS, faults)

    def check_scores(self, requests: list[tuple[GenerationRequest, tuple[int, ...], tuple[float, ...]]]) -> None:
        """Score finished requests (with their tokens and log-probabilities) anew, and compare token by token."""
        for request, tokens, log_probs in requests:
            sequence = (*request.prompt, *tokens)
            scored = self._inner.score(TokenBatch((sequence,), (len(request.prompt),)))[0].log_probs
            apart = np.abs(scored.astype(np.float64) - np.asarray(log_probs))
            worst = float(apart.max(initial=0.0))
            allowed = self._allowed_nats(worst)
            wrong = not worst <= allowed  # NaN is wrong
            what = f"a token was generated at {worst:.3g} nats from what the engine scores it alone (allowed: {allowed:.3g})"
            self.count(Check.WRONG_SCORES, [what] if wrong else [])

    def _allowed_nats(self, worst: float) -> float:
        """Return the tolerance; the first requests of a process set it."""
        if len(self._usual_nats) < NUM_USUAL and worst <= MOST_NATS_TOLERANCE:
            self._usual_nats.append(worst)
        return min(MOST_NATS_TOLERANCE, max(NATS_TOLERANCE, USUAL_FACTOR * max(self._usual_nats, default=0.0)))

    def count(self, check: Check, faults: list[str]) -> None:
        """Note that a check was made once, and what it found."""
        self._checked[check] = self._checked.get(check, 0) + 1
        self._found[check] = self._found.get(check, 0) + bool(faults)
        if faults:
            self._first.setdefault(check, faults[0])

    def tallies(self) -> tuple[Tally, ...]:
        """Return what was counted since the last call."""
        told = tuple(
            Tally(check=check, num_checked=count, num_found=self._found[check], first=self._first.get(check, ""))
            for check, count in self._checked.items()
        )
        self._checked, self._found, self._first = {}, {}, {}
        return told

    def _check_time(self, event: TokenEvent, now_ns: int) -> None:
        earliest_ns = self._times.get(event.request, event.time_ns)
        faults = []
        if event.time_ns < earliest_ns:
            faults.append(f"a token is {(earliest_ns - event.time_ns) / 1e9:.3g} s older than what came before it")
        if event.time_ns > now_ns:
            faults.append(f"a token is {(event.time_ns - now_ns) / 1e9:.3g} s in the future")
        self.count(Check.CLOCK_FAULTS, faults)
        if event.finished:
            self._times.pop(event.request, None)
        else:
            self._times[event.request] = event.time_ns

    def _activity(self) -> Activity | None:
        return self._inner.activity() if isinstance(self._inner, NativeRuntime) else None
