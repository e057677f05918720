"""When a server is over its capacity: told of every one that is, and of none that only swings. Queues are simulated."""

import heapq
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.arrivals import poisson
from model_optimizer.measurement.openloop import ClosedLoop, LoadRun, Observer, OpenLoop, Snapshot
from model_optimizer.measurement.samples import LoadSamples, RequestStatus
from model_optimizer.measurement.saturation import BacklogWatch, SweepPlan, run_sweep
from model_optimizer.measurement.self_watch import GeneratorHealth

HEALTHY = GeneratorHealth(
    dispatch_delay_ms={}, loop_lag_ms={}, cpu_ratio=0.1, waited_ratio=None, num_waited_for_connection=0, limits=(), behind=""
)


@dataclass
class Queue:
    """A server of `num_slots` with exponential service times, in computed time; serves in order."""

    capacity_per_s: float
    num_slots: int
    seed: int
    behind: str = ""
    reject_beyond: int | None = None
    offered: list[float] = field(default_factory=list)

    def finished_s(self, due_s: np.typing.NDArray[np.float64]) -> np.typing.NDArray[np.float64]:
        """When each request ends; -1: rejected at once."""
        generator = np.random.default_rng([self.seed, due_s.size])
        service_s = generator.exponential(self.num_slots / self.capacity_per_s, due_s.size).tolist()
        free, ends, running = [0.0] * self.num_slots, np.zeros(due_s.size), list[float]()
        for number, at in enumerate(due_s.tolist()):
            running = [end for end in running if end > at] if self.reject_beyond is not None else []
            if self.reject_beyond is not None and len(running) > self.reject_beyond:
                ends[number] = -1
                continue
            end = max(heapq.heappop(free), at) + service_s[number]
            heapq.heappush(free, end)
            ends[number] = end
            running.append(end)
        return ends

    def __call__(self, arrivals: OpenLoop | ClosedLoop, observer: Observer | None) -> LoadRun:
        if isinstance(arrivals, ClosedLoop):
            due_s = np.arange(arrivals.num_requests or 1) * 100.0
        else:
            due_s = arrivals.offsets_ns / 1e9
            self.offered.append(due_s.size / float(due_s[-1]))
        ends = self.finished_s(due_s)
        rejected = ends < 0
        ends = np.where(rejected, due_s, ends)
        stop_s = np.inf
        for at in np.arange(0.05, float(ends.max()) + 0.05, 0.05) if observer else ():
            assert observer is not None
            seen = Snapshot(
                float(at), due_s.size, int((due_s <= at).sum()), int((ends <= at).sum()), int((rejected & (due_s <= at)).sum())
            )
            if observer.tick(seen):
                stop_s = float(at)
                break
        sent = due_s <= stop_s
        due_s, ends, rejected = due_s[sent], ends[sent], rejected[sent]
        status = np.where(ends > stop_s, RequestStatus.CANCELLED, np.where(rejected, RequestStatus.REJECTED, RequestStatus.OK))
        due_ns, none = (due_s * 1e9).astype(np.int64), np.full(due_s.size, -1, dtype=np.int64)
        samples = LoadSamples(
            intended_ns=due_ns,
            started_ns=due_ns,
            first_token_ns=none,
            finished_ns=(np.minimum(ends, stop_s) * 1e9).astype(np.int64),
            num_tokens=np.zeros(due_s.size, dtype=np.int64),
            offsets=np.zeros(due_s.size + 1, dtype=np.int64),
            token_times_ns=none[:0],
            chunk_tokens=none[:0],
            status=status.astype(np.int8),
        )
        reasons = Counter({"status 429": int(rejected.sum())}) if rejected.any() else Counter[str]()
        health = HEALTHY.model_copy(update={"behind": self.behind if observer else ""})
        return LoadRun(samples, none, reasons, "", health, 0, stop_s < np.inf)


def offered(queue: Queue, rate_per_s: float, duration_s: float, seed: int) -> BacklogWatch:
    """Run one step; its ramp is three times the mean service time."""
    watch = BacklogWatch(rate_per_s, 3 * queue.num_slots / queue.capacity_per_s)
    queue(OpenLoop(poisson(rate_per_s, duration_s, seed)), watch)
    return watch


def test_backlog_watch_tells_over_from_under_capacity() -> None:
    """100 servers of 1 to 16 slots with random service times: over at 1.4 times their capacity, never at 0.9 times."""
    over, under = 0, 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        capacity, slots = float(np.exp(generator.uniform(np.log(100), np.log(800)))), int(generator.choice([1, 2, 4, 16]))
        queue = Queue(capacity, slots, seed)
        over += bool(offered(queue, 1.4 * capacity, 6.0, seed).reason)
        under += bool(offered(queue, 0.9 * capacity, 6.0, seed).reason)
    assert (over, under) == (100, 0)


def test_backlog_watch_does_not_take_a_long_ramp_for_a_growing_queue() -> None:
    """Answers of 3 s at 100/s: for 3 s the number in flight only rises, though nothing waits."""
    queue = Queue(capacity_per_s=100_000.0, num_slots=300_000, seed=0)
    assert offered(queue, 100.0, 12.0, 0).reason == ""


def test_run_sweep_finds_the_capacity_and_stops_soon_after() -> None:
    queue = Queue(capacity_per_s=300.0, num_slots=4, seed=5)
    sweep = run_sweep(queue, lambda rate, length: OpenLoop(poisson(rate, length, 7)), SweepPlan(step_s=8.0), lambda rate: None)
    assert sweep.saturated and sweep.capacity_per_s == pytest.approx(300, rel=0.08)
    assert sweep.sustained_per_s is not None and 200 < sweep.sustained_per_s < 340
    assert max(queue.offered) < 2.2 * 300 and "requests in flight grow" in sweep.ended_because
    assert sweep.base_ms == pytest.approx(4 / 300 * 1e3, rel=0.9)
    quiet = [point for point in sweep.points if not point.over_capacity]
    assert all(point.finished_per_s == pytest.approx(point.offered_per_s, rel=0.2) for point in quiet)


def test_run_sweep_takes_rejections_for_saturation() -> None:
    queue = Queue(capacity_per_s=200.0, num_slots=2, seed=1, reject_beyond=8)
    plan = SweepPlan(step_s=6.0, first_per_s=50.0, num_refinements=0)
    sweep = run_sweep(queue, lambda rate, length: OpenLoop(poisson(rate, length, 2)), plan, lambda rate: None)
    assert "failed or were rejected" in sweep.ended_because and sweep.points[-1].num_failed >= 10
    assert sweep.capacity_per_s == pytest.approx(200, rel=0.2)


def test_run_sweep_blames_the_generator_and_not_the_server() -> None:
    queue = Queue(capacity_per_s=1e5, num_slots=64, seed=1, behind="it used 99% of a core")
    plan = SweepPlan(step_s=0.5, first_per_s=100.0)
    sweep = run_sweep(queue, lambda rate, length: OpenLoop(poisson(rate, length, 2)), plan, lambda rate: None)
    assert not sweep.saturated and sweep.capacity_per_s is None and sweep.sustained_per_s is None
    assert "the generator itself could not offer 100/s: it used 99% of a core" in sweep.ended_because


def test_run_sweep_ends_at_the_highest_rate_allowed() -> None:
    plan = SweepPlan(step_s=0.5, first_per_s=100.0, max_per_s=300.0)
    sweep = run_sweep(Queue(1e5, 64, 1), lambda rate, length: OpenLoop(poisson(rate, length, 2)), plan, lambda rate: None)
    assert [point.offered_per_s for point in sweep.points] == [100, 200, 300] and sweep.sustained_per_s == 300


def test_run_sweep_refuses_a_server_that_fails_alone() -> None:
    queue = Queue(1.0, 1, 1, reject_beyond=-1)
    with pytest.raises(ConfigError, match="requests fail before any load: status 429"):
        run_sweep(queue, lambda rate, length: OpenLoop(poisson(rate, length, 2)), SweepPlan(), lambda rate: None)
