"""Facts and rates of the machine at hand, set against independent sources."""

import os
import subprocess
import sys

import psutil
import pytest
import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.hardware.cuda import nvml_names
from model_optimizer.hardware.fingerprint import fingerprint, fingerprint_facts
from model_optimizer.hardware.probe import probe_buffer_bytes, probe_device
from model_optimizer.hardware.system import cpu_model, instruction_sets, physical_cores
from model_optimizer.protocols import Quiet


def test_fingerprint_is_stable_and_loads_no_framework() -> None:
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from model_optimizer.hardware.fingerprint import fingerprint\n"
        "print(fingerprint(), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == [fingerprint(), "False", "False"]


def test_fingerprint_facts_names_library_versions() -> None:
    facts = fingerprint_facts()
    assert facts["torch"] == torch.__version__
    assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert facts["cpu"] == cpu_model()


def test_physical_cores_lies_within_what_the_system_counts() -> None:
    assert 1 <= physical_cores() <= min(len(os.sched_getaffinity(0)), psutil.cpu_count(logical=True) or 1)


def test_instruction_sets_agree_with_torch() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    known = {"AVX2": "avx2", "AVX512": "avx512f"}
    if capability in known:
        assert known[capability] in instruction_sets()


@pytest.mark.parametrize(
    ("cache", "free", "expected"),
    [
        (32 << 20, 64 << 30, 256 << 20),
        (128 << 20, 64 << 30, 512 << 20),
        (300 << 20, 64 << 30, 1 << 30),
        (300 << 20, 2 << 30, 1 << 28),
    ],
)
def test_probe_buffer_bytes_exceeds_the_cache_where_memory_allows(cache: int, free: int, expected: int) -> None:
    assert probe_buffer_bytes(cache, free) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_probe_device_says_that_there_is_no_gpu() -> None:
    with pytest.raises(UnsupportedError, match="no GPU that torch"):
        probe_device("cuda", Quiet())


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto takes the GPU")
def test_probe_device_measures_this_cpu() -> None:
    facts = probe_device("auto", Quiet())
    assert facts.kind == "cpu"
    assert facts.num_cores == physical_cores()
    assert facts.memory_bytes == psutil.virtual_memory().total
    assert 0.2e9 < facts.copy_bytes_per_s < 2e12
    assert 0.2e9 < facts.read_bytes_per_s < 2e12
    peak = facts.num_cores * 6e9 * 64  # two 512-bit multiply-add units at 6 GHz
    assert 1e9 < facts.matmul_flop_per_s < peak


def test_nvml_names_agree_with_torch() -> None:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    assert all(any(told.startswith(name) for told in nvml_names()) for name in names)
