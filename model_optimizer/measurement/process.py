"""What this process holds in memory, now and at its peak."""

import contextlib
import ctypes
import functools
import gc
import sys
import threading
from types import TracebackType

import psutil

from model_optimizer.artifacts.base import Frozen

_LIBC = "libc.so.6"


class Counters(Frozen):
    """What a process holds at a quiesced moment: nothing in flight, garbage collected, free memory given back."""

    rss_bytes: int
    anonymous_bytes: int
    """Resident and backed by no file: neither code nor mapped weights, which the system drops and reads again as it likes."""
    heap_bytes: int | None
    """In use by the C allocator, which also holds the tensors of the CPU; None where the C library does not tell."""
    python_blocks: int
    """Small objects of the interpreter, which come from arenas of its own."""
    num_fds: int
    num_threads: int
    device_bytes: int = 0
    """Tensors on the GPU by torch's own allocator; 0 without one."""
    device_reserved_bytes: int = 0
    """What that allocator keeps from the driver."""


def rss_bytes() -> int:
    """Return the resident size of this process."""
    return int(psutil.Process().memory_info().rss)


def quiesced_rss_bytes() -> int:
    """Return the resident size after garbage collection and after the allocator gave free pages back."""
    _quiesce()
    return rss_bytes()


def quiesced_counters() -> Counters:
    """Return every counter after garbage collection and after the allocators gave free memory back."""
    _quiesce()
    device_bytes, reserved_bytes = _device_bytes()
    process = psutil.Process()
    memory = process.memory_info()
    return Counters(
        rss_bytes=memory.rss,
        anonymous_bytes=memory.rss - memory.shared if sys.platform == "linux" else memory.rss,
        heap_bytes=heap_bytes(),
        python_blocks=sys.getallocatedblocks(),
        num_fds=process.num_fds(),
        num_threads=process.num_threads(),
        device_bytes=device_bytes,
        device_reserved_bytes=reserved_bytes,
    )


def peak_rss_bytes() -> int:
    """Return the largest resident size that this process ever had."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def heap_bytes() -> int | None:
    """Return the bytes in use of all arenas and large blocks of glibc; None with another C library.

    Source: mallinfo2(3), glibc 2.33 and later: `uordblks` + `hblkhd`.
    """
    if sys.platform != "linux":
        return None
    try:
        ask = _libc().mallinfo2
    except (OSError, AttributeError):
        return None
    ask.restype = _MallInfo2
    told = ask()
    return int(told.uordblks + told.hblkhd)


class _MallInfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library, opened once: every opening makes classes that only a collection takes away."""
    return ctypes.CDLL(_LIBC)


def _quiesce() -> None:
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library has nothing to trim
            _libc().malloc_trim(0)


def _device_bytes() -> tuple[int, int]:
    """Return bytes allocated and reserved on the GPU; nothing is loaded or initialised for it."""
    if "torch" not in sys.modules:
        return 0, 0
    import torch

    if not torch.cuda.is_initialized():
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


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
