"""Stress run: steady and burst load, canaries, non-finite values and memory, in segments that survive kill -9.

Every finished segment is one journal record. A killed run goes on with the time that is missing; what lay between
the last record and the kill was not tested and does not count.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.measure import Interval
from model_optimizer.artifacts.verification import SoakResult
from model_optimizer.journal import Journal
from model_optimizer.measurement.load import LoadRecord, run_closed_loop
from model_optimizer.measurement.process import quiesced_rss_bytes
from model_optimizer.protocols import GenerationRequest, Progress, Runtime
from model_optimizer.spec import Traffic
from model_optimizer.traffic.lengths import build_requests, prompt_of_length, sample_requests
from model_optimizer.verification.config import SoakConfig

PHASE_S = 5.0
MIN_PHASES = 4
"""Per segment: memory is read after each, and a slope needs points."""
BURST_FACTOR = 2
"""A burst submits this many times the planned concurrency at once."""
NUM_CANARIES, CANARY_PROMPT_TOKENS, CANARY_NEW_TOKENS = 4, 24, 16
JUMP_PROMPT_TOKENS, JUMP_NEW_TOKENS = 8, 8
STREAM_BLOCK = 64
"""Requests drawn at once from the traffic's lengths."""
WARM_UP_RATIO = 0.25
"""Share of memory readings at the start that the slope leaves out: pools and allocators fill then."""
MIN_SLOPE_POINTS = 3


class MemoryPoint(Frozen):
    """Resident size at a quiesced moment: no request in flight, garbage collected, allocator trimmed."""

    at_s: float
    """Tested time since the soak began."""
    rss_bytes: int


class Segment(Frozen):
    """One journal record."""

    session: int
    """Counts the processes that worked on this soak; memory is compared within one only."""
    ran_s: float
    num_requests: int
    num_failed: int
    num_non_finite: int
    num_tokens: int
    canaries: tuple[tuple[tuple[int, ...], ...], ...]
    """Tokens of every canary, at the beginning and at the end of the segment."""
    memory: tuple[MemoryPoint, ...]
    end_to_end_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Stress:
    """What the soak does to a runtime."""

    traffic: Traffic
    text_tokens: tuple[int, ...]
    concurrency: int
    max_model_len: int
    seed: int

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

    def stream(self, segment: int) -> Iterator[GenerationRequest]:
        """Yield requests without end; prompts as in the traffic, outputs cut to its median so that many requests pass."""
        for block in itertools.count():
            seed = self.seed + 1_000_003 * segment + block
            shapes = sample_requests(self.traffic, self.max_model_len, STREAM_BLOCK, seed)
            median = self.traffic.output_tokens.p50
            short = [shape._replace(output_tokens=min(shape.output_tokens, median)) for shape in shapes]
            yield from build_requests(short, self.text_tokens, seed)


def run_soak(runtime: Runtime, stress: Stress, config: SoakConfig, journal: Journal[Segment], progress: Progress) -> SoakResult:
    """Load the runtime until `config.duration` seconds have been tested, continuing where the journal ends."""
    session = journal.records[-1].session + 1 if journal.records else 0
    missing_s = config.duration - _tested_s(journal.records)
    for _ in progress.track(range(max(0, math.ceil(missing_s / config.segment))), "soak segments"):
        if (missing_s := config.duration - _tested_s(journal.records)) <= 0:
            break
        journal.append(_run_segment(runtime, stress, min(config.segment, missing_s), session, journal.records))
    return summarise_soak(journal.records, config.duration)


def _tested_s(records: Sequence[Segment]) -> float:
    return sum(record.ran_s for record in records)


def _run_segment(runtime: Runtime, stress: Stress, segment_s: float, session: int, earlier: Sequence[Segment]) -> Segment:
    start, tested_s = time.monotonic(), _tested_s(earlier)
    phase_s = min(PHASE_S, segment_s / MIN_PHASES)
    canaries = stress.canaries()
    first = run_closed_loop(runtime, canaries, len(canaries))
    records = [first, run_closed_loop(runtime, stress.length_jump(), 1)]
    requests, memory = stress.stream(len(earlier)), list[MemoryPoint]()
    while time.monotonic() - start < segment_s or len(memory) < MIN_PHASES:
        burst = len(memory) % 2 == 1
        records.append(_burst(runtime, requests, stress) if burst else _steady(runtime, requests, stress, phase_s))
        memory.append(MemoryPoint(at_s=tested_s + time.monotonic() - start, rss_bytes=quiesced_rss_bytes()))
    last = run_closed_loop(runtime, canaries, len(canaries))
    records.append(last)
    loaded = records[2:-1]
    return Segment(
        session=session,
        ran_s=time.monotonic() - start,
        num_requests=sum(record.num_requests for record in records),
        num_failed=sum(record.num_failed for record in records),
        num_non_finite=sum(record.num_non_finite for record in records),
        num_tokens=sum(record.token_times_ns.size for record in records),
        canaries=tuple(tuple(record.tokens_of(index) for index in range(len(canaries))) for record in (first, last)),
        memory=tuple(memory),
        end_to_end_ms=tuple(round(float(value), 3) for record in loaded for value in record.end_to_end_ms()),
    )


def _steady(runtime: Runtime, requests: Iterator[GenerationRequest], stress: Stress, phase_s: float) -> LoadRecord:
    """Keep the planned concurrency in flight for a while."""
    deadline_ns = time.perf_counter_ns() + int(phase_s * 1e9)
    block = tuple(itertools.islice(requests, stress.concurrency * STREAM_BLOCK))
    return run_closed_loop(runtime, block, stress.concurrency, deadline_ns=deadline_ns)


def _burst(runtime: Runtime, requests: Iterator[GenerationRequest], stress: Stress) -> LoadRecord:
    """Submit more than the planned concurrency at once and wait for all."""
    block = tuple(itertools.islice(requests, BURST_FACTOR * stress.concurrency))
    return run_closed_loop(runtime, block, len(block))


def summarise_soak(records: Sequence[Segment], requested_s: float) -> SoakResult:
    """Return what all segments saw together; the same records give the same result."""
    reference = records[0].canaries[0]
    outputs = [output for record in records for output in record.canaries]
    latencies_ms = np.array([value for record in records for value in record.end_to_end_ms] or [0.0])
    third = max(1, latencies_ms.size // 3)
    slope, interval = _memory_slope(records)
    return SoakResult(
        requested_s=requested_s,
        ran_s=_tested_s(records),
        num_segments=len(records),
        num_requests=sum(record.num_requests for record in records),
        num_failed=sum(record.num_failed for record in records),
        num_non_finite=sum(record.num_non_finite for record in records),
        num_canaries=sum(len(output) for output in outputs),
        num_wrong_canaries=sum(
            tokens != expected for output in outputs for tokens, expected in zip(output, reference, strict=True)
        ),
        memory_slope_bytes_per_hour=slope,
        memory_slope_interval=interval,
        p50_first_ms=float(np.median(latencies_ms[:third])),
        p50_last_ms=float(np.median(latencies_ms[-third:])),
        num_sessions=len({record.session for record in records}),
        num_tokens=sum(record.num_tokens for record in records),
    )


def _memory_slope(records: Sequence[Segment]) -> tuple[float, Interval]:
    """Return the Theil-Sen slope with its 95 % interval, from the session with the most readings, its start left out.

    Source: Sen, Estimates of the regression coefficient based on Kendall's tau, JASA 63, 1968.
    """
    from scipy.stats import theilslopes

    sessions: dict[int, list[MemoryPoint]] = {}
    for record in records:
        sessions.setdefault(record.session, []).extend(record.memory)
    longest = max(sessions.values(), key=len)
    points = longest[min(int(len(longest) * WARM_UP_RATIO), len(longest) - MIN_SLOPE_POINTS) :]
    hours = np.array([point.at_s for point in points]) / 3600
    slope, _, lower, upper = theilslopes(np.array([point.rss_bytes for point in points]), hours, alpha=0.95)
    return float(slope), Interval(lower=float(lower), upper=float(upper))
