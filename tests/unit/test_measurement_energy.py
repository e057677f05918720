"""Energy from counters whose readings are given; the idle draw comes off, and what cannot be counted is said."""

import time
from pathlib import Path

import pytest

from model_optimizer.artifacts.measure import Origin
from model_optimizer.measurement import energy
from model_optimizer.measurement.energy import (
    Meter,
    RaplCounter,
    Usage,
    energy_measures,
    find_rapl,
    measure_energy,
    summed,
)
from model_optimizer.measurement.gpu import nsys_command


def rapl(root: Path, *readings_uj: int, limit_uj: int = 10**9) -> tuple[Path, ...]:
    zones = []
    for index, reading in enumerate(readings_uj):
        zone = root / f"intel-rapl:{index}"
        zone.mkdir(parents=True, exist_ok=True)
        (zone / "energy_uj").write_text(str(reading))
        (zone / "max_energy_range_uj").write_text(str(limit_uj))
        zones.append(zone)
    (root / "intel-rapl:0:0").mkdir(exist_ok=True)  # a part of package 0, already counted in it
    return tuple(zones)


def test_rapl_counter_sums_packages_and_survives_a_wrap(tmp_path: Path) -> None:
    zones = rapl(tmp_path, 999_000_000, 5_000_000)
    counter = find_rapl(tmp_path)
    assert isinstance(counter, RaplCounter)
    (zones[0] / "energy_uj").write_text("1000000")  # wrapped: 1,000,001 to the limit and over, then 1,000,000
    (zones[1] / "energy_uj").write_text("8000000")
    assert counter.read_j() == pytest.approx(2.000001 + 3.0)
    assert counter.read_j() == pytest.approx(2.000001 + 3.0)


def test_find_rapl_says_why_there_is_none(tmp_path: Path) -> None:
    assert "no RAPL zones" in str(find_rapl(tmp_path / "absent"))


class Ramp:
    """10 W while idle, then 250 J for the work."""

    source = "a counter"

    def __init__(self) -> None:
        self.readings = iter((0.0, None, 100.0, 350.0))
        self.begun_s = 0.0

    def read_j(self) -> float:
        reading = next(self.readings)
        if reading is None:
            return 10.0 * (time.monotonic() - self.begun_s)
        self.begun_s = time.monotonic()
        return reading


def test_meter_measures_the_idle_draw_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "MIN_RUN_S", 0.0)
    meter = Meter(Ramp(), "", None, idle_s=0.02)
    meter.start()
    used = meter.stop()
    assert used.total_j == 250.0 and used.source == "a counter"
    assert used.idle_w == pytest.approx(10.0, rel=0.05)


def test_meter_has_no_energy_of_a_stretch_that_is_too_short() -> None:
    meter = Meter(Ramp(), "", None, idle_s=0.0)
    meter.start()
    used = meter.stop()
    assert used.total_j is None and used.net_j is None and "2 s at least are needed" in used.source


def test_net_energy_takes_idle_off_and_is_never_negative() -> None:
    assert Usage(total_j=500, idle_w=20, wall_s=10).net_j == 300
    assert Usage(total_j=100, idle_w=20, wall_s=10).net_j == 0


def test_summed_adds_stretches_and_weighs_ratios_by_time() -> None:
    one = Usage(wall_s=10, total_j=500, idle_w=20, source="NVML", sm_ratio=0.9)
    two = Usage(wall_s=30, total_j=700, idle_w=20, source="NVML", sm_ratio=0.5)
    both = summed([one, two])
    assert both is not None and (both.wall_s, both.total_j, both.idle_w) == (40, 1200, 20)
    assert both.sm_ratio == pytest.approx(0.6) and both.net_j == 400
    lacking = summed([one, Usage(wall_s=1, source="too short")])
    assert lacking is not None and lacking.total_j is None and lacking.source == "too short"
    assert summed([]) is None


def test_energy_measures_are_joules_for_requests_and_tokens() -> None:
    used = Usage(wall_s=20, total_j=5000, idle_w=100, source="NVML", sm_ratio=0.4, kernel_ratio=0.9)
    per_requests, per_token, use = energy_measures(used, num_requests=500, num_tokens=10_000)
    assert per_requests.value == pytest.approx(3000 / 0.5) and per_requests.metric == "resource/energy_j_per_1k_requests"
    assert per_token.value == pytest.approx(0.3)
    assert use.value == 0.4 and "below 0.6" in use.reason and "GPM" in use.reason


def test_utilization_without_gpm_counters_is_called_an_upper_bound() -> None:
    *energies, use = energy_measures(Usage(wall_s=1, source="no counter", kernel_ratio=0.9), 10, 10)
    assert [it.origin for it in energies] == [Origin.NOT_MEASURED] * 2 and {it.reason for it in energies} == {"no counter"}
    assert use.value == 0.9 and "upper bound" in use.reason and "below" not in use.reason


def test_measure_energy_does_the_work_where_nothing_counts() -> None:
    result, used = measure_energy(lambda: 42, "cuda:99")
    assert result == 42 and used.total_j is None and "GPU 99" in used.source


def test_nsys_command_is_absent_without_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nsys_command(tmp_path / "r", 5) is None
    (tmp_path / "nsys").write_text("#!/bin/sh\n")
    (tmp_path / "nsys").chmod(0o755)
    command = nsys_command(tmp_path / "r", 5)
    assert command is not None and command[0] == str(tmp_path / "nsys") and "--duration=5" in command
