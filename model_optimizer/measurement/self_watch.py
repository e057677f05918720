"""Watches the load generator itself: a generator that is late or out of CPU measures itself, and must say so."""

import asyncio
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from model_optimizer.measurement.samples import NS_PER_MS, NS_PER_S, LoadSamples
from model_optimizer.measurement.timer import Alarm

BEAT_NS = 10_000_000
LEAST_LAG_MS = 1.0
LAG_SHARE_RATIO = 0.01
"""Lateness may be so much of the latency at the same percentile, or `LEAST_LAG_MS` where that is more."""
CPU_LIMIT_RATIO = 0.95
"""Of one core, over the run."""
BEHIND_RATIO = 0.02
"""Of the run by which the median request may be late: where a tenth of the load cannot be sent it becomes a twentieth."""
_JUDGED = (0.5, 0.9, 0.95, 0.99, 0.999)
"""Every percentile that a report shows."""
_SHOWN = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}
_SCHEDULER = Path("/proc/thread-self/schedstat")


class GeneratorHealth(BaseModel):
    """How the generator kept up with its own schedule."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dispatch_delay_ms: dict[str, float]
    """Actual minus intended start, by percentile; all zero in a closed loop."""
    loop_lag_ms: dict[str, float]
    """How late the event loop woke, by percentile: the most that an arrival was stamped late."""
    cpu_ratio: float
    """Of one core."""
    waited_ratio: float | None
    """Share of the time in which it could have run but had no core; None where the system does not tell."""
    num_waited_for_connection: int
    limits: tuple[str, ...]
    """Why the figures are the generator's own; empty where they are the server's."""
    behind: str
    """Why it could not send as many requests as it should, which is worse than being a little late; empty where it could."""

    @property
    def limited(self) -> bool:
        return bool(self.limits)


class SelfWatch:
    """Beats every 10 ms while a run goes on and notes how late each beat was."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._alarm = Alarm(loop, self._beat)
        self._lags_ns: list[int] = []
        self._due_ns = self._started_ns = time.perf_counter_ns()
        self._cpu_s, self._waited_ns = time.process_time(), _waited_ns()
        self._next()

    def close(self) -> None:
        """Stop watching; the figures stay."""
        self._alarm.close()
        self._wall_s = (time.perf_counter_ns() - self._started_ns) / NS_PER_S
        self._cpu_s = time.process_time() - self._cpu_s
        before, after = self._waited_ns, _waited_ns()
        self._waited_ns = None if before is None or after is None else after - before

    def judge(self, samples: LoadSamples, num_waited_for_connection: int) -> GeneratorHealth:
        """Return what was seen, and whether it is large enough to show in the latencies."""
        delays_ms = samples.dispatch_delay_ms()
        lags_ms = np.array(self._lags_ns, dtype=np.float64) / NS_PER_MS
        wall_s = max(self._wall_s, 1e-9)
        cpu_ratio = self._cpu_s / wall_s
        waited = None if self._waited_ns is None else self._waited_ns / NS_PER_S / wall_s
        late = _late("requests were sent", delays_ms, samples) + _late("arrivals were seen", lags_ms, samples)
        behind = list[str]()
        if cpu_ratio > CPU_LIMIT_RATIO:
            behind.append(f"it used {cpu_ratio:.0%} of a core")
        if num_waited_for_connection:
            behind.append(f"{num_waited_for_connection} requests waited for a free connection; raise --max-connections")
        if delays_ms.size and (median_s := float(np.median(delays_ms)) / 1e3) > BEHIND_RATIO * wall_s:
            behind.append(f"half of the requests were sent {median_s:.3g} s late or more")
        return GeneratorHealth(
            dispatch_delay_ms=_percentiles(delays_ms),
            loop_lag_ms=_percentiles(lags_ms),
            cpu_ratio=cpu_ratio,
            waited_ratio=waited,
            num_waited_for_connection=num_waited_for_connection,
            limits=(*late, *behind),
            behind=behind[0] if behind else "",
        )

    def _beat(self) -> None:
        self._lags_ns.append(time.perf_counter_ns() - self._due_ns)
        self._next()

    def _next(self) -> None:
        # beats that a late one ran past are missed, not caught up: the late one stands for them
        self._due_ns = max(self._due_ns + BEAT_NS, time.perf_counter_ns())
        self._alarm.set(self._due_ns)


def _late(what: str, lateness_ms: NDArray[np.float64], samples: LoadSamples) -> tuple[str, ...]:
    """Return, for the first percentile at which lateness shows in the latency, a sentence."""
    latency_ms = samples.ttft_ms() if samples.token_times_ns.size else samples.end_to_end_ms()
    if not lateness_ms.size or not latency_ms.size:
        return ()
    for ratio in _JUDGED:
        late, latency = float(np.quantile(lateness_ms, ratio)), float(np.quantile(latency_ms, ratio))
        if late > max(LEAST_LAG_MS, LAG_SHARE_RATIO * latency):
            return (f"{what} {late:.3g} ms late at P{100 * ratio:g}, where the latency is {latency:.3g} ms",)
    return ()


def _percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    if not values.size:
        return {}
    return {name: float(np.quantile(values, ratio)) for name, ratio in _SHOWN.items()}


def _waited_ns() -> int | None:
    """Return how long this thread has waited for a core since it began; None where the system does not tell."""
    try:
        return int(_SCHEDULER.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
