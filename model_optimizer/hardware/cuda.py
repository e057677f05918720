"""NVIDIA GPUs: what the driver says (NVML) and what torch.cuda measures. An absent driver is an answer, not an error."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from model_optimizer.artifacts.target import DeviceFacts
from model_optimizer.protocols import Progress

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
BUFFER_BYTES = 2 << 30
NUM_REPEATS = 10
MATMUL_SIZE = 8192
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One PCIe lane in one direction by generation, after line coding. Source: PCI-SIG base specifications; see X20."""


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """What the driver says about one GPU; None where it does not tell (virtual GPUs)."""

    name: str
    driver: str
    power_limit_w: float | None
    pcie_bytes_per_s: float | None
    """One direction, at the highest generation and width that card and slot can do."""
    compute_capability: str | None = None
    """e.g. `8.9`."""


def nvml_names() -> tuple[str, ...]:
    """Return `name, driver version` per GPU; empty without a driver. Loads no framework."""
    return tuple(f"{gpu.name}, driver {gpu.driver}" for gpu in nvml_facts())


def nvml_facts() -> tuple[NvmlFacts, ...]:
    """Return what the driver says about every GPU; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return tuple(_gpu_facts(index, driver) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu_facts(index: int, driver: str) -> NvmlFacts:
    """Ask the driver about one GPU."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def told(ask: Callable[[object], T]) -> T | None:
        try:
            return ask(handle)
        except pynvml.NVMLError:
            return None

    power_mw = told(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    capability = told(pynvml.nvmlDeviceGetCudaComputeCapability)
    generation, width = told(pynvml.nvmlDeviceGetMaxPcieLinkGeneration), told(pynvml.nvmlDeviceGetMaxPcieLinkWidth)
    return NvmlFacts(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        driver=driver,
        power_limit_w=None if power_mw is None else power_mw / 1000,
        pcie_bytes_per_s=width * LANE_BYTES_PER_S[generation] if generation in LANE_BYTES_PER_S and width else None,
        compute_capability=None if capability is None else "{}.{}".format(*capability),
    )


def probe_cuda(progress: Progress) -> DeviceFacts:
    """Return facts and measured rates of torch's current GPU; a few seconds."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    driver_facts = next((gpu for gpu in nvml_facts() if gpu.name == properties.name), None)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    buffer_bytes = min(BUFFER_BYTES, free_bytes // 8)
    progress.note(f"measuring {properties.name}: memory bandwidth over {buffer_bytes / 2**20:.0f} MiB and the matrix rate")
    copy_bytes_per_s, read_bytes_per_s = _memory_rates(device, buffer_bytes)
    matmul_flop_per_s = _matmul_rate(device)
    torch.cuda.empty_cache()
    return DeviceFacts(
        kind="cuda",
        name=properties.name,
        num_cores=properties.multi_processor_count,
        instruction_sets=(f"sm_{properties.major}{properties.minor}",),
        cache_bytes={"l2": properties.L2_cache_size},
        memory_bytes=total_bytes,
        memory_free_bytes=free_bytes,
        copy_bytes_per_s=copy_bytes_per_s,
        read_bytes_per_s=read_bytes_per_s,
        matmul_flop_per_s=matmul_flop_per_s,
        driver=driver_facts.driver if driver_facts else None,
        power_limit_w=driver_facts.power_limit_w if driver_facts else None,
        pcie_bytes_per_s=driver_facts.pcie_bytes_per_s if driver_facts else None,
    )


def _memory_rates(device: "torch.device", buffer_bytes: int) -> tuple[float, float]:
    """Return median copy (bytes read + written) and best read rate, in bytes per second."""
    import torch

    source = torch.ones(buffer_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = statistics.median(_event_s(lambda: target.copy_(source)))
    return 2 * source.numel() * 4 / copy_s, source.numel() * 4 / min(_event_s(source.sum))


def _matmul_rate(device: "torch.device") -> float:
    """Return the median bfloat16 rate of a square product of random numbers (equal ones would draw less power)."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=device, generator=generator)
    right = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=device, generator=generator)
    return 2 * MATMUL_SIZE**3 / statistics.median(_event_s(lambda: left @ right))


def _event_s(work: Callable[[], object]) -> list[float]:
    """Return the seconds of `NUM_REPEATS` calls on the GPU's own clock, after three that warm up."""
    import torch

    for _ in range(3):
        work()
    seconds = []
    for _ in range(NUM_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return seconds
