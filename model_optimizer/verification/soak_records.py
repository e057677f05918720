"""What a soak writes down: one record for every minute, and what the parts of a minute found."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Self

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.verification import Tally
from model_optimizer.measurement.energy import Usage
from model_optimizer.measurement.process import Counters


class Check(StrEnum):
    """Counts that must be zero; a record says for each how often it looked and how often it found something."""

    CRASHES = "crashes"
    PAGE_FAULTS = "page_faults"
    CLOCK_FAULTS = "clock_faults"
    WRONG_SCORES = "wrong_scores"
    FAILED_TRIALS = "failed_trials"


class Drift(Frozen):
    """Teacher-forced scores of a fixed set of texts at one moment; equal weights give equal bits."""

    digest: str
    mean_log_prob_nats: float
    num_tokens: int
    greedy: str
    """Hexadecimal bits, one a token: whether it was the likeliest."""


class ControlRun(Frozen):
    """One run of the reference workload in the control arm."""

    digest: str
    """Of its outputs; the same engine gives the same."""
    wall_s: float
    cpu_s: float


class ControlReading(Frozen):
    """The control arm at one moment: a twin process that only ever runs the fixed reference workload."""

    digest: str
    """Of the reference workload's outputs; the same engine gives the same."""
    wall_s: float
    """The fastest of the repetitions."""
    cpu_s: float
    counters: Counters


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
    stands_for_s: float = 0.0
    """Time of real traffic that it stands for: `ran_s`, or more where the soak is accelerated."""
    began_unix_s: float = 0.0
    ended_unix_s: float = 0.0
    """Between a record's end and the next one's beginning nothing was tested."""
    clock_step_s: float = 0.0
    """How far the wall clock moved against the monotonic one meanwhile."""
    canary_digests: tuple[str, ...] = ()
    """Of tokens and log-probability bits of every run of the canaries."""
    canary_s: float = 0.0
    """The fastest of the runs at the end."""
    canary_cpu_s: float = 0.0
    output_digest: str = ""
    """Of all tokens that the load produced."""
    num_preemptions: int = 0
    """Requests that had to give their memory back for older ones and were computed again."""
    counters: Counters | None = None
    """After the last canaries, so that every reading follows the same work."""
    peak_rss_bytes: int = 0
    control: ControlReading | None = None
    drift: Drift | None = None
    usage: Usage | None = None
    """Energy, and use of the GPU."""
    tallies: tuple[Tally, ...] = ()

    @classmethod
    def crashed(cls, session: int, how: str, at_unix_s: float) -> Self:
        """Return the record of a process that ended by itself; it tested nothing."""
        return cls(
            session=session, ran_s=0, num_requests=0, num_failed=0, num_non_finite=0, num_tokens=0, canaries=(), memory=(),
            end_to_end_ms=(), began_unix_s=at_unix_s, ended_unix_s=at_unix_s,
            tallies=(Tally(check=Check.CRASHES, num_checked=1, num_found=1, first=how),),
        )  # fmt: skip


def merged(tallies: Iterable[Tally]) -> tuple[Tally, ...]:
    """Return one tally for each check that was made, the earliest finding kept."""
    sums: dict[str, Tally] = {}
    for tally in tallies:
        held = sums.get(tally.check)
        sums[tally.check] = tally if held is None else Tally(
            check=tally.check,
            num_checked=held.num_checked + tally.num_checked,
            num_found=held.num_found + tally.num_found,
            first=held.first or tally.first,
        )  # fmt: skip
    return tuple(sums[check] for check in Check if check in sums)
