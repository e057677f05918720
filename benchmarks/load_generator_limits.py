"""The limits of server and generator: is a full server noticed, and does a generator that is short of CPU say so?"""

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from benchmarks.evidence import Figure
from benchmarks.load_generator_parts import (
    OURS_CORE,
    RATE_PER_S,
    SERVER_CORE,
    Setting,
    body,
    on_core,
    pinned,
    tell,
)
from benchmarks.load_generator_peers import PATH
from benchmarks.load_generator_truth import true_latency_s
from model_optimizer.measurement.arrivals import poisson
from model_optimizer.measurement.http_client import Endpoint
from model_optimizer.measurement.openloop import ClosedLoop, LoadPlan, LoadRun, Observer, OpenLoop, run_load
from model_optimizer.measurement.saturation import Sweep, SweepPlan, run_sweep
from model_optimizer.measurement.scripted_server import Script, running

NUM_HOGS = 3
BUSY_DELAY_MS = 20.0
BUSY_SECONDS = 4.0


def saturation(setting: Setting) -> list[Figure]:
    """Return of how many seeded servers the sweep notices that they are full, and how near it comes to their capacity."""
    noticed, early, errors = 0, 0, list[float]()
    for seed in range(setting.num_servers):
        generator = np.random.default_rng(seed)
        capacity = float(np.exp(generator.uniform(np.log(400), np.log(2000))))
        slots, spread = int(generator.choice([1, 2, 4, 8])), float(generator.choice([0.0, 0.3, 0.6]))
        delays_ms = generator.lognormal(0.0, spread, 2000)
        delays_ms *= 1e3 * slots / capacity / delays_ms.mean()
        with running(Script(ttft_ms=tuple(delays_ms.tolist()), num_slots=slots), on_core(SERVER_CORE)) as url:
            found = _sweep(url, seed)
        over = [point.offered_per_s for point in found.points if point.over_capacity]
        noticed += bool(over)
        early += any(rate < 0.95 * capacity for rate in over)
        if found.capacity_per_s is not None:
            errors.append(abs(found.capacity_per_s / capacity - 1))
        tell(f"server {seed}: capacity {capacity:.0f}/s, found {found.capacity_per_s}, {found.ended_because}")
    num = setting.num_servers
    figures = [
        Figure("ours", "saturation_detected_ratio", noticed / num, "ratio", n=num),
        Figure("ours", "saturation_too_early_ratio", early / num, "ratio", n=num),
    ]
    if errors:
        middle, worst = statistics.median(errors), float(np.quantile(errors, 0.95))
        figures.append(Figure("ours", "capacity_error_ratio", middle, "ratio", min(errors), worst, len(errors)))
    return figures


def _sweep(url: str, seed: int) -> Sweep:
    endpoint = Endpoint.of(url, PATH)
    bodies = [body(4, stream=False, seed=number) for number in range(2000)]

    def load(arrivals: OpenLoop | ClosedLoop, observer: Observer | None) -> LoadRun:
        return run_load(endpoint, LoadPlan(bodies, arrivals, stream=False), observer)

    plan = SweepPlan(step_s=1.5, num_refinements=0)
    with pinned():
        return run_sweep(load, lambda rate, length: OpenLoop(poisson(rate, length, seed)), plan, lambda rate: None)


def busy(setting: Setting) -> list[Figure]:
    """Return how often a generator whose core others take says so, and how often it shows a tail better than the truth."""
    limited, better = 0, 0
    with running(Script(ttft_ms=(BUSY_DELAY_MS,)), on_core(SERVER_CORE)) as url, hogs():
        for number in range(setting.num_busy):
            with pinned():
                arrivals = OpenLoop(poisson(RATE_PER_S, BUSY_SECONDS, number))
                run = run_load(Endpoint.of(url, PATH), LoadPlan([body(4, stream=False)], arrivals, stream=False))
            limited += run.health.limited
            due_s = (run.samples.intended_ns - run.samples.intended_ns[0]) / 1e9
            truth_ms = 1e3 * true_latency_s(due_s, np.full(due_s.size, BUSY_DELAY_MS / 1e3), ())
            measured_ms = run.samples.end_to_end_ms()
            better += any(np.quantile(measured_ms, ratio) < np.quantile(truth_ms, ratio) for ratio in (0.5, 0.99, 0.999))
            tell(f"busy {number}: P99 {np.quantile(measured_ms, 0.99):.3g} ms, limits {run.health.limits}")
    num = setting.num_busy
    return [
        Figure("ours-busy", "generator_limited_ratio", limited / num, "ratio", n=num),
        Figure("ours-busy", "better_than_truth_count", float(better), "count", n=num),
    ]


@contextlib.contextmanager
def hogs() -> Iterator[None]:
    """Keep the generator's core busy with other processes while the body runs."""
    command = [*on_core(OURS_CORE), sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(NUM_HOGS)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
