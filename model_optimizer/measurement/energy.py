"""Energy of a run, with what the machine draws when it does nothing taken off.

GPUs count it themselves (NVML total energy); CPUs do by RAPL, where the system lets it be read. Where neither does, energy is
not measured, and why is said: power is never guessed from a data sheet.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from model_optimizer.measurement.gpu import LOW_SM_RATIO, Utilization, UtilizationSampler, energy_counter_mj, nvml_device

T = TypeVar("T")

RAPL = Path("/sys/class/powercap")
IDLE_S = 5.0
"""How long the idle draw is measured before the run."""
MIN_RUN_S = 2.0
"""NVML's counter is renewed every 20 to 100 ms; a shorter run is known to a few percent only, and is refused."""


class EnergyCounter(Protocol):
    """A counter in joules that only rises; differences of readings are energy."""

    @property
    def source(self) -> str: ...
    def read_j(self) -> float: ...


class NvmlCounter:
    """One GPU's own counter."""

    source = "NVML total energy counter of the GPU"

    def __init__(self, handle: object):
        self._handle = handle

    def read_j(self) -> float:
        told = energy_counter_mj(self._handle)
        assert told is not None, "a counter that was there when it was found is gone"
        return told / 1000


class RaplCounter:
    """The packages' counters (cores, caches, memory controller), which wrap around."""

    source = "RAPL package counters"

    def __init__(self, zones: tuple[Path, ...]):
        self._zones = zones
        self._limits = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._last = [int((zone / "energy_uj").read_text()) for zone in zones]
        self._total_uj = 0

    def read_j(self) -> float:
        for index, zone in enumerate(self._zones):
            now = int((zone / "energy_uj").read_text())
            self._total_uj += (now - self._last[index]) % (self._limits[index] + 1)
            self._last[index] = now
        return self._total_uj / 1e6


def find_rapl(root: Path = RAPL) -> RaplCounter | str:
    """Return the counter over all CPU packages, or why there is none."""
    zones = tuple(sorted(zone for zone in root.glob("intel-rapl:[0-9]*") if zone.name.count(":") == 1))
    if not zones:
        return f"no RAPL zones below {root} (virtual machine, or not an x86 CPU)"
    try:
        return RaplCounter(zones)
    except OSError as error:
        return f"RAPL is there and cannot be read ({error.strerror}); the system keeps it for root"


class Usage(Frozen):
    """What one stretch of work took."""

    wall_s: float
    total_j: float | None = None
    """None where nothing counts it."""
    idle_w: float = 0.0
    """What the machine drew before the first stretch, doing nothing."""
    source: str = ""
    """What counted, or why nothing did."""
    sm_ratio: float | None = None
    kernel_ratio: float | None = None
    """Of the GPU, see `Utilization`."""

    @property
    def net_j(self) -> float | None:
        """Return the energy above idle, never below 0."""
        return None if self.total_j is None else max(0.0, self.total_j - self.idle_w * self.wall_s)


class Meter:
    """Meters stretches of work: `start`, then `stop`."""

    def __init__(self, counter: EnergyCounter | None, reason: str, handle: object | None, idle_s: float):
        """Measure the idle draw first where something counts."""
        self._counter = counter
        self._reason = reason
        self._handle = handle
        self._sampler: UtilizationSampler | None = None
        self._idle_w = self._start_j = self._start_s = 0.0
        if counter is not None:
            before_j, start = counter.read_j(), time.monotonic()
            time.sleep(idle_s)
            self._idle_w = (counter.read_j() - before_j) / (time.monotonic() - start)

    def start(self) -> None:
        """Begin a stretch."""
        if self._handle is not None:
            self._sampler = UtilizationSampler(self._handle)
            self._sampler.__enter__()
        self._start_j = self._counter.read_j() if self._counter else 0.0
        self._start_s = time.monotonic()

    def stop(self) -> Usage:
        """End it; a stretch shorter than `MIN_RUN_S` has no energy."""
        wall_s = time.monotonic() - self._start_s
        total_j = self._counter.read_j() - self._start_j if self._counter else None
        source = self._counter.source if self._counter else self._reason
        if total_j is not None and wall_s < MIN_RUN_S:
            total_j, source = None, f"the run took {wall_s:.2f} s; {MIN_RUN_S:g} s at least are needed"
        used = Utilization(None, None, 0)
        if self._sampler is not None:
            self._sampler.__exit__(None, None, None)
            used = self._sampler.result()
        return Usage(
            wall_s=wall_s,
            total_j=total_j,
            idle_w=self._idle_w,
            source=source,
            sm_ratio=used.sm_ratio,
            kernel_ratio=used.kernel_ratio,
        )


@contextmanager
def opened_meter(device: str, *, idle_s: float = IDLE_S) -> Iterator[Meter]:
    """Yield the meter of `cuda`, `cuda:N` or `cpu`; where nothing counts, its stretches say why."""
    if not device.startswith("cuda"):
        found = find_rapl()
        yield Meter(None, found, None, 0) if isinstance(found, str) else Meter(found, "", None, idle_s)
        return
    index = int(device.partition(":")[2] or 0)
    with nvml_device(index) as handle:
        if handle is None:
            yield Meter(None, f"the driver knows no GPU {index}", None, 0)
        elif energy_counter_mj(handle) is None:
            yield Meter(None, "the GPU has no energy counter (virtual, or before Volta)", handle, 0)
        else:
            yield Meter(NvmlCounter(handle), "", handle, idle_s)


def measure_energy(work: Callable[[], T], device: str, *, idle_s: float = IDLE_S) -> tuple[T, Usage]:
    """Do the work once and meter it; where nothing counts, the work is done all the same."""
    with opened_meter(device, idle_s=idle_s) as meter:
        meter.start()
        result = work()
        return result, meter.stop()


def summed(usages: Sequence[Usage]) -> Usage | None:
    """Return several stretches as one; energy is missing where one of them has none."""
    if not usages:
        return None
    wall_s = sum(usage.wall_s for usage in usages)
    joules = [usage.total_j for usage in usages]
    known = [total_j for total_j in joules if total_j is not None]
    lacking = next((usage.source for usage in usages if usage.total_j is None), "")

    def mean(ratios: list[tuple[float | None, float]]) -> float | None:
        told = [(ratio, weight) for ratio, weight in ratios if ratio is not None]
        total = sum(weight for _, weight in told)
        return sum(ratio * weight for ratio, weight in told) / total if total else None

    return Usage(
        wall_s=wall_s,
        total_j=sum(known) if len(known) == len(joules) else None,
        idle_w=sum(usage.idle_w * usage.wall_s for usage in usages) / wall_s if wall_s else 0.0,
        source=lacking or usages[0].source,
        sm_ratio=mean([(usage.sm_ratio, usage.wall_s) for usage in usages]),
        kernel_ratio=mean([(usage.kernel_ratio, usage.wall_s) for usage in usages]),
    )


def energy_measures(used: Usage | None, num_requests: int, num_tokens: int) -> tuple[Measure, ...]:
    """Return joules for 1000 requests and for a token, net of idle, and the GPU's use; not measured where nothing counted."""
    per = (("energy", "j_per_1k_requests", num_requests / 1000), ("token_energy", "j_per_token", float(num_tokens)))
    net_j = used.net_j if used else None
    if used is None or net_j is None or not num_requests or not num_tokens:
        why = used.source if used and used.total_j is None else "nothing was run"
        rows = [_row(name, unit, None, why) for name, unit, _ in per]
    else:
        told = (
            f"{used.source}; {used.total_j:.1f} J in {used.wall_s:.1f} s, of which an idle draw of {used.idle_w:.1f} W "
            "was taken off"
        )
        rows = [_row(name, unit, net_j / count, told) for name, unit, count in per]
    use = Utilization(used.sm_ratio, used.kernel_ratio, 0).best_known if used else None
    if use is None:
        return (*rows, _row("sm_utilization", "ratio", None, "no GPU that tells its utilization was used"))
    ratio, what = use
    low = f"; below {LOW_SM_RATIO}: the GPU waits, and a smaller engine saves little" if ratio < LOW_SM_RATIO else ""
    measure = _row("sm_utilization", "ratio", ratio, f"{what}{low}")
    return (*rows, measure.model_copy(update={"higher_is_better": True, "limit": LOW_SM_RATIO}))


def _row(name: str, unit: str, value: float | None, reason: str) -> Measure:
    return Measure(
        name=name,
        dimension=Dimension.RESOURCE,
        unit=unit,
        value=value,
        origin=Origin.NOT_MEASURED if value is None else Origin.MEASURED,
        reason=reason,
    )
