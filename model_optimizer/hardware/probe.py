"""Measure a device once, shortly: how fast memory is copied and read, how fast it multiplies."""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from model_optimizer.artifacts.target import DeviceFacts
from model_optimizer.errors import UnsupportedError
from model_optimizer.hardware.cuda import nvml_names, probe_cuda
from model_optimizer.hardware.system import cache_bytes, cpu_model, instruction_sets, physical_cores
from model_optimizer.protocols import Progress

if TYPE_CHECKING:
    import torch

MAX_BUFFER_BYTES = 1 << 30
CACHED_BUFFER_BYTES = 8 << 20
"""Held by any last-level cache of a server or laptop together with what else runs."""
MIN_REPEATS, MAX_REPEATS, MAX_SHORT_REPEATS = 3, 7, 300
ENOUGH_S = 1.0
"""No more repeats of one kernel once they have taken this long together."""
ROW = 2048
MATMUL_SIZE = 2048


def probe_device(kind: Literal["auto", "cpu", "cuda"], progress: Progress) -> DeviceFacts:
    """Return facts and measured rates of the CPU or the first GPU; a few seconds.

    Raises:
        UnsupportedError: a GPU was asked for and there is none that torch can use.
    """
    import torch

    usable = torch.cuda.is_available()
    if kind == "cuda" and not usable:
        found = "; ".join(nvml_names()) or "none"
        raise UnsupportedError(
            f"no GPU that torch {torch.__version__} can use; the driver reports: {found}; set target.hardware: cpu"
        )
    if kind == "cuda" or (kind == "auto" and usable):
        return probe_cuda(progress)
    return probe_cpu(progress)


def probe_cpu(progress: Progress) -> DeviceFacts:
    """Return facts and measured rates of the CPU with torch's current number of threads."""
    import psutil

    caches = cache_bytes()
    memory = psutil.virtual_memory()
    buffer_bytes = probe_buffer_bytes(max(caches.values(), default=0), memory.available)
    progress.note(f"measuring memory bandwidth over {buffer_bytes / 2**20:.0f} MiB and the matrix rate, a few seconds")
    copy, read = _memory_rates(buffer_bytes)
    return DeviceFacts(
        kind="cpu",
        name=cpu_model(),
        num_cores=physical_cores(),
        instruction_sets=instruction_sets(),
        cache_bytes=caches,
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        copy_bytes_per_s=copy,
        read_bytes_per_s=read,
        read_cached_bytes_per_s=_cached_read_rate() if caches else None,
        matmul_flop_per_s=_matmul_rate(),
    )


def probe_buffer_bytes(cache_bytes_largest: int, free_bytes: int) -> int:
    """Return a buffer size of four times the largest cache, 256 MiB at least, 1 GiB and an eighth of free memory at most."""
    wanted = max(4 * cache_bytes_largest, 256 << 20)
    return min(wanted, MAX_BUFFER_BYTES, free_bytes // 8)


def _memory_rates(buffer_bytes: int) -> tuple[float, float]:
    """Return copy rate (bytes read plus written, between the halves of a buffer) and read rate, in bytes per second."""
    import torch

    buffer = torch.ones(buffer_bytes // 4, dtype=torch.float32)
    source, target = buffer.chunk(2)
    copy_s = statistics.median(repeat_s(lambda: target.copy_(source)))
    return 2 * source.numel() * 4 / copy_s, _read_rate(buffer, MAX_REPEATS)


def _read_rate(buffer: "torch.Tensor", max_repeats: int) -> float:
    """Return the best rate at which two kernels read a buffer: a sum, and a matrix-vector product as decoding does it."""
    import torch

    matrix = buffer[: buffer.numel() // ROW * ROW].view(-1, ROW)
    vector = torch.ones(ROW, dtype=torch.float32)

    best_s = min(*repeat_s(buffer.sum, max_repeats), *repeat_s(lambda: torch.mv(matrix, vector), max_repeats))
    return matrix.numel() * 4 / best_s


def _cached_read_rate() -> float:
    """Return the read rate of a buffer that stays in the last-level cache; a call takes about a millisecond, so many are made."""
    import torch

    return _read_rate(torch.ones(CACHED_BUFFER_BYTES // 4, dtype=torch.float32), MAX_SHORT_REPEATS)


def _matmul_rate() -> float:
    """Return the median float32 rate of a square product, 2 n^3 operations, in FLOP per second."""
    import torch

    left = torch.ones(MATMUL_SIZE, MATMUL_SIZE)
    right, product = torch.ones_like(left), torch.empty_like(left)
    return 2 * MATMUL_SIZE**3 / statistics.median(repeat_s(lambda: torch.mm(left, right, out=product)))


def repeat_s(work: Callable[[], object], max_repeats: int = MAX_REPEATS) -> list[float]:
    """Return the seconds of three to `max_repeats` calls, after one that warms up; no more once `ENOUGH_S` have passed."""
    work()
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or (len(seconds) < max_repeats and sum(seconds) < ENOUGH_S):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds
