"""Stress run: steady and burst load, canaries, drift samples, extremes and memory, in segments that survive kill -9.

Every finished segment is one journal record, a minute at most. A killed run goes on with the time that is missing; what lay
between the last record and the kill was not tested and does not count.

A segment begins with the canaries, loads the runtime in phases, scores some of what it generated anew, and ends with the
canaries again, next to the control arm's: then nothing is in flight and every counter is read after the same work. At the
first segment of a process, every hour and at the end, a fixed set of texts is scored and the extremes are tried.

Accelerated, a segment holds a stated number of requests and stands for its whole time: what requests and hourly work bring
about comes sooner. What only time brings about does not (`NOT_ACCELERATED`), and real hours are what counts for a sign-off.
"""

import gc
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from model_optimizer.artifacts.verification import SoakResult
from model_optimizer.journal import Journal
from model_optimizer.measurement.energy import Meter, opened_meter
from model_optimizer.measurement.load import run_closed_loop
from model_optimizer.measurement.process import Counters, peak_rss_bytes, quiesced_counters, quiesced_rss_bytes
from model_optimizer.protocols import GenerationRequest, Progress, Runtime, TokenBatch
from model_optimizer.spec import Traffic
from model_optimizer.traffic.lengths import build_requests, prompt_of_length, sample_requests
from model_optimizer.verification.config import SoakConfig
from model_optimizer.verification.soak_extremes import run_trials
from model_optimizer.verification.soak_load import SegmentLoad
from model_optimizer.verification.soak_records import Check, ControlReading, ControlRun, Drift, MemoryPoint, Segment
from model_optimizer.verification.soak_reference import Reference, run_reference
from model_optimizer.verification.soak_summary import summarise_soak
from model_optimizer.verification.soak_watch import Watched

PHASE_S = 5.0
MIN_PHASES = 4
"""Per segment: memory is read after each, and a slope needs points."""
BURST_FACTOR = 2
"""A burst submits this many times the planned concurrency at once."""
NUM_CANARIES, CANARY_PROMPT_TOKENS, CANARY_NEW_TOKENS = 4, 24, 16
NUM_TURNS, ACCELERATED_TURNS = 3, 9
"""Runs of the canaries at the end of a segment, here and in the control arm by turns; the fastest counts for time. Accelerated,
there are few segments and each lasts a moment, so more is asked of it."""
JUMP_PROMPT_TOKENS, JUMP_NEW_TOKENS = 8, 8
STREAM_BLOCK = 64
"""Requests drawn at once from the traffic's lengths."""
NUM_DRIFT_TEXTS, DRIFT_TEXT_TOKENS = 8, 64
"""Without a golden subset: windows of the text that the prompts are cut from."""
NOT_ACCELERATED = (
    "heat and the clock rates that follow from it",
    "timers of libraries, driver and system; expiring credentials and connections",
    "growth by the hour in code that does not read the soak's clock",
    "faults of the hardware, and what neighbours on the machine do",
)
"""What an accelerated soak does not bring forward."""


@dataclass(frozen=True, slots=True)
class Stress:
    """What the soak does to a runtime."""

    traffic: Traffic
    text_tokens: tuple[int, ...]
    concurrency: int
    max_model_len: int
    seed: int
    golden: tuple[tuple[int, ...], ...] = ()
    """Texts of the drift samples, e.g. golden items with their right answers; windows of `text_tokens` where there are none."""

    def canaries(self) -> tuple[GenerationRequest, ...]:
        """Return fixed prompts, always submitted together so that the batch keeps its shape."""
        length = max(1, min(CANARY_PROMPT_TOKENS, self.max_model_len // 2))
        new = max(1, min(CANARY_NEW_TOKENS, self.max_model_len // 2))
        starts = range(0, length * min(NUM_CANARIES, self.concurrency), length)
        return tuple(GenerationRequest(prompt_of_length(self.text_tokens, length, start), new) for start in starts)

    def length_jump(self) -> tuple[GenerationRequest, ...]:
        """Return a short request and the longest that the traffic and the engine allow."""
        new = max(1, min(JUMP_NEW_TOKENS, self.max_model_len // 2))
        longest = min(self.traffic.prompt_tokens.max, self.max_model_len - new)
        lengths = (min(JUMP_PROMPT_TOKENS, longest), longest)
        return tuple(GenerationRequest(prompt_of_length(self.text_tokens, length), new) for length in lengths)

    def drift_batch(self) -> TokenBatch:
        """Return the texts of a drift sample, each scored from its second token on."""
        length = max(2, min(DRIFT_TEXT_TOKENS, self.max_model_len))
        windows = tuple(prompt_of_length(self.text_tokens, length, start * length) for start in range(NUM_DRIFT_TEXTS))
        texts = tuple(text[: self.max_model_len] for text in self.golden if len(text) > 1) or windows
        return TokenBatch(texts, (1,) * len(texts))

    def stream(self, segment: int) -> Iterator[GenerationRequest]:
        """Yield requests without end; prompts as in the traffic, outputs cut to its median so that many requests pass."""
        for block in itertools.count():
            seed = self.seed + 1_000_003 * segment + block
            shapes = sample_requests(self.traffic, self.max_model_len, STREAM_BLOCK, seed)
            median = self.traffic.output_tokens.p50
            short = [shape._replace(output_tokens=min(shape.output_tokens, median)) for shape in shapes]
            yield from build_requests(short, self.text_tokens, seed)


class Control(Protocol):
    """The control arm (`soak_twin.Twin`)."""

    def run(self) -> ControlRun: ...
    def counters(self) -> Counters: ...


@dataclass(slots=True)
class TrafficClock:
    """Hours of traffic that were tested so far; what is to be warped with an accelerated soak reads it."""

    hours: float = 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What stands around a soak."""

    control: Control | None = None
    clock: TrafficClock = field(default_factory=TrafficClock)
    stop: Callable[[], str] = lambda: ""
    """Asked after every segment; a reason ends the soak, and the result says so."""


def run_soak(
    runtime: Runtime,
    stress: Stress,
    config: SoakConfig,
    journal: Journal[Segment],
    progress: Progress,
    *,
    setting: Setting | None = None,
) -> SoakResult:
    """Load the runtime until `config.duration` seconds have been tested, continuing where the journal ends.

    Records are not kept in memory meanwhile, so that the soak does not grow by its own notes.
    """
    setting = setting or Setting()
    records = journal.records
    session = records[-1].session + 1 if records else 0
    runner = _Runner(Watched(runtime), stress, config, setting, session)
    runner.number = sum(record.num_requests > 0 for record in records)
    runner.stood_for_s, runner.tested_s = stood_for_s(records), sum(record.ran_s for record in records)
    total, why = math.ceil(max(0.0, config.duration - runner.stood_for_s) / config.segment), list[str]()

    def segments() -> Iterator[float]:
        while not why and (missing_s := config.duration - runner.stood_for_s) > 0:
            yield missing_s

    with opened_meter(runtime.facts.device) as runner.meter, _frozen():
        for missing_s in progress.track(segments(), "soak segments", total):
            journal.append(runner.run(missing_s))
            journal.records.clear()
            why += filter(None, [setting.stop()])
    journal.records[:] = read_records(journal)
    return summarise_soak(journal.records, config.duration).model_copy(update={"stopped_because": "".join(why)})


def stood_for_s(records: Sequence[Segment]) -> float:
    """Return the time of real traffic that was tested."""
    return sum(record.stands_for_s for record in records)


def read_records(journal: Journal[Segment]) -> list[Segment]:
    """Return all records as they lie on disk."""
    lines = journal.path.read_bytes().splitlines()[1:]
    return [Segment.model_validate_json(line) for line in lines]


@contextmanager
def _frozen() -> Iterator[None]:
    """Set what exists aside from garbage collection, which is asked for at every reading."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Runner:
    """Runs segment after segment in one process."""

    def __init__(self, runtime: Watched, stress: Stress, config: SoakConfig, setting: Setting, session: int):
        self.number = 0
        self.stood_for_s = self.tested_s = 0.0
        self._runtime, self._stress, self._config, self._setting = runtime, stress, config, setting
        self._session = session
        self.meter: Meter | None = None
        self._is_first = True
        self._tail_s = 0.0
        """What came after the load in a segment, at most so far, so that a whole segment keeps its time."""

    def run(self, missing_s: float) -> Segment:
        """Run one segment, at most as long as is missing."""
        segment_s = min(self._config.segment, missing_s)
        start, began_unix_s = time.monotonic(), time.time()
        if self.meter:
            self.meter.start()
        drift = self._hourly(segment_s, is_last=missing_s <= self._config.segment)
        canaries = self._stress.canaries()
        first = run_reference(self._runtime, canaries)
        load, memory = SegmentLoad(), list[MemoryPoint]()
        for record in (first.record, run_closed_loop(self._runtime, self._stress.length_jump(), 1)):
            load.count(record)
        for _ in self._phases(start, segment_s, load):
            if not self._is_accelerated:
                memory.append(MemoryPoint(at_s=self.tested_s + time.monotonic() - start, rss_bytes=quiesced_rss_bytes()))
        tail_start = time.monotonic()
        self._runtime.check_scores(load.some())
        last, control = self._side_by_side(canaries)
        self._runtime.check_pool(idle=True)
        for run in last:
            load.count(run.record)
        self._tail_s = max(self._tail_s, time.monotonic() - tail_start)
        counters = quiesced_counters()
        ran_s = time.monotonic() - start
        if self._is_accelerated:
            memory.append(MemoryPoint(at_s=self.tested_s + ran_s, rss_bytes=counters.rss_bytes))
        stands_for_s = segment_s if self._is_accelerated else ran_s
        self._advance(ran_s, stands_for_s)
        return Segment(
            session=self._session,
            ran_s=ran_s,
            stands_for_s=stands_for_s,
            began_unix_s=began_unix_s,
            ended_unix_s=time.time(),
            clock_step_s=time.time() - began_unix_s - (time.monotonic() - start),
            num_requests=load.num_requests,
            num_failed=load.num_failed,
            num_non_finite=self._runtime.take_non_finite(),
            num_tokens=load.num_tokens,
            canaries=(first.tokens, last[-1].tokens),
            canary_digests=(first.digest, *(run.digest for run in last)),
            canary_s=min(run.wall_s for run in last),
            canary_cpu_s=min(run.cpu_s for run in last),
            output_digest=load.output_digest,
            num_preemptions=self._runtime.num_preemptions(),
            memory=tuple(memory),
            counters=counters,
            peak_rss_bytes=peak_rss_bytes(),
            control=control,
            drift=drift,
            usage=self.meter.stop() if self.meter else None,
            tallies=self._runtime.tallies(),
            end_to_end_ms=load.end_to_end_ms(),
        )

    @property
    def _is_accelerated(self) -> bool:
        return self._config.requests_per_segment is not None

    def _advance(self, ran_s: float, stands_for_s: float) -> None:
        self.number += 1
        self.tested_s += ran_s
        self.stood_for_s += stands_for_s
        self._setting.clock.hours = self.stood_for_s / 3600

    def _hourly(self, segment_s: float, *, is_last: bool) -> Drift | None:
        """Take a drift sample and try the extremes where a new process or a new hour begins, and in the last segment."""
        every_s = self._config.drift_every
        is_due = is_last or self._is_first or self.stood_for_s // every_s != (self.stood_for_s - segment_s) // every_s
        self._is_first = False
        if not is_due:
            return None
        for name, complaint in run_trials(self._runtime, self._stress.text_tokens, self._stress.concurrency):
            self._runtime.count(Check.FAILED_TRIALS, [f"{name}: {complaint}"] if complaint else [])
        return sample_drift(self._runtime, self._stress.drift_batch())

    def _phases(self, start: float, segment_s: float, load: SegmentLoad) -> Iterator[None]:
        """Run load after load, steady and burst in turn, and yield after each, when none of its requests is held any more."""
        requests, stress = self._stress.stream(self.number), self._stress
        burst = BURST_FACTOR * stress.concurrency
        if (num_requests := self._config.requests_per_segment) is not None:
            sizes = (
                [(num_requests - burst, stress.concurrency), (burst, burst)] if num_requests > burst else [(num_requests, burst)]
            )
            for size, concurrency in sizes:
                self._load(load, tuple(itertools.islice(requests, size)), concurrency)
                yield
            return
        phase_s = min(PHASE_S, segment_s / MIN_PHASES)
        end = start + max(segment_s / 2, segment_s - self._tail_s)
        began, longest_s = time.monotonic(), phase_s
        for number in itertools.count():
            now = time.monotonic()
            longest_s, began = max(longest_s, now - began), now
            if number >= MIN_PHASES and now + longest_s > end:
                return
            if number % 2:
                self._load(load, tuple(itertools.islice(requests, burst)), burst)
            else:
                deadline_ns = time.perf_counter_ns() + int(phase_s * 1e9)
                num_most = stress.concurrency * STREAM_BLOCK
                self._load(load, tuple(itertools.islice(requests, num_most)), stress.concurrency, deadline_ns)
            yield

    def _load(
        self, load: SegmentLoad, block: tuple[GenerationRequest, ...], concurrency: int, deadline_ns: int | None = None
    ) -> None:
        load.add(block, run_closed_loop(self._runtime, block, concurrency, deadline_ns=deadline_ns))

    def _side_by_side(self, canaries: tuple[GenerationRequest, ...]) -> tuple[list[Reference], ControlReading | None]:
        """Run the reference workload here and in the control arm by turns, so that what passes by meets both."""
        control, runs, others = self._setting.control, list[Reference](), list[ControlRun]()
        for turn in range(ACCELERATED_TURNS if self._is_accelerated else NUM_TURNS):
            there_first = (self.number + turn) % 2
            if control and there_first:
                others.append(control.run())
            runs.append(run_reference(self._runtime, canaries))
            if control and not there_first:
                others.append(control.run())
        return runs, _control_reading(others, runs[-1].digest, control.counters()) if control else None


def _control_reading(runs: Sequence[ControlRun], expected: str, counters: Counters) -> ControlReading:
    """Return the fastest of the runs, and the digest of one that differs from what is expected, where one does."""
    return ControlReading(
        digest=next((run.digest for run in runs if run.digest != expected), expected),
        wall_s=min(run.wall_s for run in runs),
        cpu_s=min(run.cpu_s for run in runs),
        counters=counters,
    )


def sample_drift(runtime: Runtime, batch: TokenBatch) -> Drift:
    """Score the texts of a drift sample."""
    scores = runtime.score(batch)
    log_probs = np.concatenate([score.log_probs for score in scores])
    greedy = np.concatenate([score.is_greedy for score in scores])
    return Drift(
        digest=hashlib.sha256(log_probs.astype(np.float32).tobytes()).hexdigest(),
        mean_log_prob_nats=float(log_probs.mean(dtype=np.float64)),
        num_tokens=log_probs.size,
        greedy=np.packbits(greedy).tobytes().hex(),
    )
