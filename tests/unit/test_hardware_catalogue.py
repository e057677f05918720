"""The device catalogue, with the corrections that it must respect (X13, X14, X20)."""

from pathlib import Path

import pytest

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.hardware.catalogue import hardware_names, probe_kind, read_entry

DEVICES = [name for name in hardware_names() if name not in ("auto", "cpu")]


def test_hardware_names_lists_the_shipped_devices() -> None:
    assert {"h200", "h100-sxm", "a100-80g", "l40s", "rtx-4090"} <= set(DEVICES)
    assert hardware_names()[:2] == ("auto", "cpu")


@pytest.mark.parametrize("name", DEVICES)
def test_read_entry_is_plausible(name: str) -> None:
    entry = read_entry(name)
    limit_kib = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227}[entry.compute_capability]
    assert entry.warp_size == 32
    assert entry.shared_memory_per_block_kib == limit_kib
    assert entry.pcie_gb_per_s in (32, 64)  # x16 of generation 4 or 5, one direction
    assert entry.int8_top_per_s >= 2 * entry.bf16_tflop_per_s
    assert (entry.fp8_tflop_per_s is None) == (entry.compute_capability < "8.9")


def test_read_entry_knows_the_a100() -> None:
    entry = read_entry("a100-80g")
    assert (entry.memory_gb_per_s, entry.bf16_tflop_per_s, entry.l2_mib, entry.num_sms) == (2039, 312, 40, 108)


@pytest.mark.parametrize("name", ["h300", "", "../h200"])
def test_probe_kind_lists_the_known_devices_when_the_name_is_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown device .*known: auto, cpu, a100-80g, h100-sxm, h200"):
        probe_kind(name)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_probe_kind_returns_what_is_measured_here(name: str) -> None:
    assert probe_kind(name) == name


def test_probe_kind_sends_elsewhere_when_the_device_is_not_here(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "profiles/hardware/l40s.yaml").read_text()
    (tmp_path / "dream.yaml").write_text(text.replace("match: [L40S]", "match: [No Such Card]"))
    with pytest.raises(UnsupportedError, match=r"'dream' \(NVIDIA L40S\) is not this machine .*measure on that machine"):
        probe_kind("dream", tmp_path)


@pytest.mark.parametrize(
    "change", [("warp_size: 32", "warp_size: 64"), ("num_sms:", "num_sm:"), ("power_w: 350", "power_w: much")]
)
def test_read_entry_refuses_a_wrong_file(tmp_path: Path, change: tuple[str, str]) -> None:
    text = (Path(__file__).parents[2] / "profiles/hardware/l40s.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(text.replace(*change))
    with pytest.raises(ConfigError, match="no device description"):
        read_entry("wrong", tmp_path)
