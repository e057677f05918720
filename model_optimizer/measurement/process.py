"""What this process holds in memory, now and at its peak."""

import contextlib
import ctypes
import gc
import sys
import threading
from types import TracebackType

import psutil


def rss_bytes() -> int:
    """Return the resident size of this process."""
    return int(psutil.Process().memory_info().rss)


def quiesced_rss_bytes() -> int:
    """Return the resident size after garbage collection and after the allocator gave free pages back."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library has nothing to trim
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    return rss_bytes()


class PeakSampler:
    """Sample the resident size in the background: `with PeakSampler() as peak: ...; peak.peak_bytes`."""

    def __init__(self, interval_s: float = 0.02):
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-sampler", daemon=True)
        self.start_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> "PeakSampler":
        self.start_bytes = self.peak_bytes = rss_bytes()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, rss_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, rss_bytes())
