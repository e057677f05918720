"""Finds the rate that a server sustains: rising steps of open-loop load, ended when the requests in flight keep growing.

Beyond its capacity a server finishes fewer requests than come, so their number in flight grows without end, whatever its
latency was before. The growth is tested, not eyeballed: a stable queue swings too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy.special import stdtrit

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.openloop import ClosedLoop, LoadRun, Observer, OpenLoop, Snapshot

MIN_GROWTH_RATIO = 0.05
"""Of the offered rate: a backlog that grows more slowly is taken for noise, or will be seen at the next rate."""
LEVELLING_RATIO = 0.7
FAILED_RATIO = 0.05
MIN_FAILED = 10
_RAMP_LATENCIES = 3.0
"""Of the slowest of the requests that were sent alone: where service times are exponential, 5 % of the ramp is left then."""
_MIN_BLOCKS = 8
_MIN_ARRIVALS = 20
"""In a block, so that its growth is roughly normal."""
_CONFIDENCE = 0.9995
"""One-sided, since a step looks once a block."""


@dataclass(slots=True)
class BacklogWatch:
    """Watches one step of load at `rate_per_s` and ends it once the server is surely over its capacity.

    Until `ramp_s` has passed and the step's first block of arrivals has been answered nothing is counted: the number in
    flight first rises in a healthy server too, up to rate times latency, and levels off.
    """

    rate_per_s: float
    ramp_s: float = 0.0
    """A few times what a request takes alone."""
    told: Observer | None = None
    reason: str = ""
    """Why the server is over its capacity; empty while it is not known to be."""
    _blocks: list[Snapshot] = field(default_factory=list)
    _ramp_over: int | None = None

    def tick(self, snapshot: Snapshot) -> bool:
        """Take note of where the run stands; return whether to end it."""
        if self.told is not None and self.told.tick(snapshot):
            return True
        if snapshot.num_planned is not None and snapshot.num_started >= snapshot.num_planned:
            return False  # nothing comes any more: what is in flight only falls
        if not self._blocks or snapshot.num_started - self._blocks[-1].num_started >= _MIN_ARRIVALS:
            self._blocks.append(snapshot)
            self.reason = self._failing(snapshot) or self._growing()
        return bool(self.reason)

    def finished_per_s(self) -> float | None:
        """Return the rate at which requests ended well once the ramp was over; None where that was too short."""
        counted = self._counted()
        if len(counted) < 3:
            return None
        first, last = counted[0], counted[-1]
        served = [it.num_finished - it.num_failed for it in (first, last)]
        return (served[1] - served[0]) / (last.elapsed_s - first.elapsed_s)

    def _counted(self) -> list[Snapshot]:
        if self._ramp_over is None:
            first = max(1, self._blocks[0].num_started) if self._blocks else 1
            reached = [
                number for number, it in enumerate(self._blocks) if it.elapsed_s >= self.ramp_s and it.num_finished >= first
            ]
            if not reached:
                return []
            self._ramp_over = reached[0]
        return self._blocks[self._ramp_over :]

    def _growing(self) -> str:
        counted = self._counted()
        if len(counted) < _MIN_BLOCKS + 1:
            return ""
        in_flight = np.array([it.num_started - it.num_finished for it in counted], dtype=np.float64)
        length_s = np.diff([it.elapsed_s for it in counted])
        growth = np.diff(in_flight) / length_s
        mean, error = float(growth.mean()), float(growth.std(ddof=1)) / np.sqrt(growth.size)
        sure = mean - float(stdtrit(growth.size - 1, _CONFIDENCE)) * error > 0
        if not sure or mean < MIN_GROWTH_RATIO * self.rate_per_s or _levels_off(growth):
            return ""
        return f"requests in flight grow by {mean:.3g}/s at {self.rate_per_s:.4g}/s offered"

    def _failing(self, snapshot: Snapshot) -> str:
        failed, ended = snapshot.num_failed, max(1, snapshot.num_finished)
        if failed < MIN_FAILED or failed < FAILED_RATIO * ended:
            return ""
        return f"{failed} of {ended} requests failed or were rejected"


def _levels_off(growth: NDArray[np.float64]) -> bool:
    """Return whether the later half grows clearly less than the first: a long ramp does, a full server does not."""
    half = growth.size // 2
    return float(growth[half:].mean()) < LEVELLING_RATIO * float(growth[:half].mean())


class Load(Protocol):
    """Runs one piece of load against the server that is measured."""

    def __call__(self, arrivals: OpenLoop | ClosedLoop, observer: Observer | None) -> LoadRun: ...


class SweepPoint(BaseModel):
    """One rate of a sweep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    offered_per_s: float
    finished_per_s: float
    """Ended well, after the ramp."""
    num_requests: int
    num_failed: int
    p50_ms: float | None
    """End to end, from the intended start, of the requests that ended well."""
    p99_ms: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    over_capacity: str
    """Why; empty where the server kept up."""
    limits: tuple[str, ...]
    """Why the latencies are the generator's own; empty where they are the server's."""
    behind: str
    """Why the generator could not offer this rate; empty where it could."""


class Sweep(BaseModel):
    """What rising rates showed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    points: tuple[SweepPoint, ...]
    base_ms: float
    """Median latency of one request alone."""
    sustained_per_s: float | None
    """The highest rate that the server kept up with, never above its capacity; None where it did at none."""
    capacity_per_s: float | None
    """Requests that it finished per second while it had more than it could do; None where it never had."""
    ended_because: str

    @property
    def saturated(self) -> bool:
        return self.capacity_per_s is not None or any(point.over_capacity for point in self.points)


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """How rates rise: from `first_per_s` by `factor` until the server is over its capacity, then between the last two."""

    step_s: float = 10.0
    """Longer where requests take so long that a step would end within its ramp."""
    first_per_s: float | None = None
    """Left out: half of what one request after the other gives."""
    factor: float = 2.0
    num_refinements: int = 3
    max_per_s: float = 50_000.0
    num_base: int = 8

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and self.factor > 1 and (self.first_per_s is None or self.first_per_s > 0)):
            raise ConfigError(
                f"a sweep takes a step above 0 s, a first rate above 0 and a factor above 1; "
                f"seen: {self.step_s:g}, {self.first_per_s}, {self.factor:g}"
            )


def run_sweep(
    load: Load, arrivals: Callable[[float, float], OpenLoop], plan: SweepPlan, told: Callable[[float], Observer | None]
) -> Sweep:
    """Raise the rate until the server is over its capacity, the generator is, or `plan.max_per_s` is reached.

    `arrivals` gives the schedule of a rate over so many seconds; `told` an observer for the step at a rate, if any.

    Raises:
        ConfigError: a request alone already fails.
    """
    base_ms, slowest_ms = _base(load, plan)
    ramp_s = _RAMP_LATENCIES * slowest_ms / 1e3
    step = _Step(load, arrivals, max(plan.step_s, 2 * ramp_s), ramp_s, told)
    rate = plan.first_per_s or 500.0 / base_ms
    points, low, high, ended = list[SweepPoint](), None, None, ""
    while not ended:
        point = step(rate)
        points.append(point)
        if point.over_capacity:
            high, ended = rate, f"over capacity at {rate:.4g}/s: {point.over_capacity}"
            ended += "" if low is not None else "; already the first rate is too high, begin with a lower one"
        elif point.behind:
            ended = f"the generator itself could not offer {rate:.4g}/s: {point.behind}"
        elif rate >= plan.max_per_s:
            low, ended = rate, f"the highest rate allowed, {rate:.4g}/s, was kept up with"
        else:
            low, rate = rate, min(rate * plan.factor, plan.max_per_s)
    for _ in range(plan.num_refinements if high is not None and low is not None else 0):
        assert low is not None and high is not None
        _settle(load, base_ms)
        middle = float(np.sqrt(low * high))
        point = step(middle)
        points.append(point)
        if point.behind and not point.over_capacity:
            break
        low, high = (low, middle) if point.over_capacity else (middle, high)
    capacity = max((point.finished_per_s for point in points if point.over_capacity), default=None)
    return Sweep(
        points=tuple(points),
        base_ms=base_ms,
        sustained_per_s=low if low is None or capacity is None else min(low, capacity),
        capacity_per_s=capacity,
        ended_because=ended,
    )


def _base(load: Load, plan: SweepPlan) -> tuple[float, float]:
    """Return the median and the longest latency of requests one after the other, in ms."""
    run = load(ClosedLoop(1, num_requests=plan.num_base), None)
    if not run.samples.ok.all():
        reason = run.reasons.most_common(1)[0][0] if run.reasons else "cancelled"
        raise ConfigError(f"requests fail before any load: {reason}. {run.first_fault}".strip())
    latency_ms = run.samples.end_to_end_ms()
    return float(np.median(latency_ms)), float(latency_ms.max())


def _settle(load: Load, base_ms: float) -> None:
    """Wait until a request alone is about as fast as before: what was cancelled may still be worked on."""
    for _ in range(20):
        run = load(ClosedLoop(1, num_requests=2), None)
        if run.samples.ok.all() and float(run.samples.end_to_end_ms()[-1]) <= 2 * base_ms + 5.0:
            return


@dataclass(frozen=True, slots=True)
class _Step:
    """Runs one rate of a sweep."""

    load: Load
    arrivals: Callable[[float, float], OpenLoop]
    length_s: float
    ramp_s: float
    told: Callable[[float], Observer | None]

    def __call__(self, rate: float) -> SweepPoint:
        watch = BacklogWatch(rate, self.ramp_s, self.told(rate))
        run = self.load(self.arrivals(rate, self.length_s), watch)
        samples, finished = run.samples, watch.finished_per_s()
        latency_ms, ttft_ms = samples.end_to_end_ms(), samples.ttft_ms()
        return SweepPoint(
            offered_per_s=rate,
            finished_per_s=finished if finished is not None else samples.requests_per_s(),
            num_requests=samples.num_requests,
            num_failed=run.reasons.total(),
            p50_ms=_quantile(latency_ms, 0.5),
            p99_ms=_quantile(latency_ms, 0.99),
            ttft_p50_ms=_quantile(ttft_ms, 0.5),
            ttft_p99_ms=_quantile(ttft_ms, 0.99),
            over_capacity=watch.reason,
            limits=run.health.limits,
            behind=run.health.behind,
        )


def _quantile(values_ms: NDArray[np.float64], ratio: float) -> float | None:
    return float(np.quantile(values_ms, ratio)) if values_ms.size else None
