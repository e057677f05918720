"""What the driver counts while a GPU works: energy, and how much of it was used. An absent driver is an answer, not an error.

SM utilization proper comes from GPM counters (Hopper and later). Elsewhere the driver tells only the share of time in which
some kernel ran, which is an upper bound and is called so.
"""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

SAMPLE_S = 0.1
LOW_SM_RATIO = 0.6
"""Below it the saving of a quantized engine is lost to an idle GPU (requirements 8, R7)."""


@contextmanager
def nvml_device(index: int) -> Iterator[object | None]:
    """Yield the driver's handle of a GPU; None without a driver or such a GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml.nvmlDeviceGetHandleByIndex(index) if index < pynvml.nvmlDeviceGetCount() else None
    finally:
        pynvml.nvmlShutdown()


def energy_counter_mj(handle: object) -> int | None:
    """Return the millijoules since the driver was loaded; None where the card does not count (before Volta, virtual ones)."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    except pynvml.NVMLError:
        return None


@dataclass(frozen=True, slots=True)
class Utilization:
    """Means over a run, as ratios."""

    sm_ratio: float | None
    """SMs that were busy, by GPM counters; None where the card has none."""
    kernel_ratio: float | None
    """Share of time in which some kernel ran: an upper bound of the former; None where it is not told."""
    num_samples: int

    @property
    def best_known(self) -> tuple[float, str] | None:
        """Return the ratio that tells most, and what it is."""
        if self.sm_ratio is not None:
            return self.sm_ratio, "SMs that were busy (GPM counters)"
        if self.kernel_ratio is not None:
            return self.kernel_ratio, "share of time in which some kernel ran, an upper bound of SM utilization"
        return None


@dataclass(slots=True)
class UtilizationSampler:
    """Ask the driver in the background: `with UtilizationSampler(handle) as sampler: ...; sampler.result()`."""

    handle: object
    interval_s: float = SAMPLE_S
    _kernel: list[float] = field(default_factory=list)
    _sm: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._sample, name="gpu-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def result(self) -> Utilization:
        """Return the means of what was seen."""
        return Utilization(_mean(self._sm), _mean(self._kernel), max(len(self._sm), len(self._kernel)))

    def _sample(self) -> None:
        import pynvml

        previous = _gpm_sample(self.handle)
        while not self._stop.wait(self.interval_s):
            with suppress(pynvml.NVMLError):  # not told by virtual GPUs
                self._kernel.append(pynvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100)
            if previous is not None and (latest := _gpm_sample(self.handle)) is not None:
                if (ratio := _sm_ratio(previous, latest)) is not None:
                    self._sm.append(ratio)
                _free(previous)
                previous = latest
        if previous is not None:
            _free(previous)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _gpm_sample(handle: object) -> object | None:
    """Return the card's counters now; None where it has none."""
    import pynvml

    try:
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return None
        sample = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(handle, sample)
    except pynvml.NVMLError:
        return None
    return sample  # type: ignore[no-any-return]


def _sm_ratio(first: object, second: object) -> float | None:
    """Return the busy SMs between two samples."""
    import pynvml

    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = 1
    asked.sample1, asked.sample2 = first, second
    asked.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
    try:
        pynvml.nvmlGpmMetricsGet(asked)
    except pynvml.NVMLError:
        return None
    value = float(asked.metrics[0].value)
    return value / 100 if 0 <= value <= 100 else None


def _free(sample: object) -> None:
    import pynvml

    pynvml.nvmlGpmSampleFree(sample)


def nsys_command(report: Path, seconds: float) -> tuple[str, ...] | None:
    """Return what to put before a command so that Nsight Systems captures it; None where it is not installed."""
    nsys = shutil.which("nsys")
    if nsys is None:
        return None
    return nsys, "profile", "--trace=cuda,nvtx,osrt", f"--duration={seconds:g}", "--force-overwrite=true", f"--output={report}"
