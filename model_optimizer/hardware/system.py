"""What the operating system says about the CPU and its memory; nothing is measured here."""

import functools
import os
import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
FLAGS_THAT_MATTER = (
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_bf16", "amx_int8", "amx_tile", "neon", "asimd", "asimddp", "sve", "i8mm", "bf16",
)  # fmt: skip
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


@functools.cache
def _cpuinfo() -> tuple[tuple[str, str], ...]:
    """Return the key-value pairs of /proc/cpuinfo, all processors; empty where the system has none."""
    if not CPUINFO.is_file():
        return ()
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return tuple((key.strip(), value.strip()) for key, separator, value in (line.partition(":") for line in lines) if separator)


def cpu_model() -> str:
    """Return the CPU's name with family, model and stepping, since virtual machines hide the rest."""
    facts = dict(_cpuinfo())
    name = facts.get("model name") or facts.get("CPU part") or platform.processor() or platform.machine()
    numbers = [f"{key} {facts[key]}" for key in ("cpu family", "model", "stepping") if key in facts]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def instruction_sets() -> tuple[str, ...]:
    """Return those CPU flags that decide which kernels run."""
    facts = dict(_cpuinfo())
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return tuple(flag for flag in FLAGS_THAT_MATTER if flag in flags)


def physical_cores() -> int:
    """Return the number of physical cores that this process may use."""
    usable = {str(cpu) for cpu in os.sched_getaffinity(0)}
    cores: set[tuple[str, str]] = set()
    processor = package = ""
    for key, value in _cpuinfo():
        if key == "processor":
            processor = value
        elif key == "physical id":
            package = value
        elif key == "core id" and processor in usable:
            cores.add((package, value))
    return len(cores) or len(usable)


def cache_bytes() -> dict[str, int]:
    """Return the size of one core's `l1d` and `l2` and of the `l3` that it sees, where known."""
    sizes: dict[str, int] = {}
    for index in sorted(CACHES.glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            level = (index / "level").read_text().strip()
            size = re.fullmatch(r"(\d+)([KMG]?)", (index / "size").read_text().strip())
        except OSError:
            continue
        if kind != "Instruction" and size:
            sizes["l1d" if level == "1" else f"l{level}"] = int(size[1]) * _UNITS[size[2]]
    return sizes
