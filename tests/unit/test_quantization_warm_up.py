"""The first requests set ranges only within bounds around the offline ones; what is refused is named."""

import math
from pathlib import Path

import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.quantization.scale_store import DiskScaleStore
from model_optimizer.quantization.warm_up import Bounds, ScaleCollector, warm_ranges

OFFLINE = {"q_proj": 2.0, "down_proj": 30.0}


def collector(num_requests: int = 10) -> ScaleCollector:
    return ScaleCollector(OFFLINE, Bounds(lowest_ratio=0.5, highest_ratio=2.0), num_requests)


def test_result_is_the_largest_accepted_magnitude_lifted_to_the_lower_bound() -> None:
    seen = collector()
    assert seen.observe("a", {"q_proj": 1.5, "down_proj": 3.0}) is None
    assert seen.observe("b", {"q_proj": 2.5, "down_proj": 9.0}) is None
    found = seen.result()
    assert found.ranges == {"q_proj": 2.5, "down_proj": 15.0} and found.lifted == ("down_proj",)
    assert (found.origin, found.num_accepted) == ("measured", 2)


@pytest.mark.parametrize("value", [60.1, 1e6, math.inf, math.nan])
def test_observe_refuses_and_names_a_poisoned_request(value: float, caplog: pytest.LogCaptureFixture) -> None:
    seen = collector()
    seen.observe("good", {"q_proj": 1.5, "down_proj": 28.0})
    rejection = seen.observe("evil", {"q_proj": 3.9, "down_proj": value})
    assert rejection is not None and (rejection.request, rejection.layer, rejection.highest) == ("evil", "down_proj", 60.0)
    assert "request evil: input of down_proj reaches" in caplog.text
    assert seen.result().ranges == {"q_proj": 1.5, "down_proj": 28.0}  # nothing of the refused request counts


def test_poisoned_requests_never_move_a_range_beyond_the_bounds() -> None:
    seen = collector(100)
    for number in range(100):
        seen.observe(str(number), {layer: value * 1.02**number for layer, value in OFFLINE.items()})
    found = seen.result()
    assert all(value <= 2 * OFFLINE[layer] for layer, value in found.ranges.items())
    assert found.origin == "offline"  # more than half of them were refused


def test_result_keeps_the_offline_ranges_when_most_requests_are_refused() -> None:
    seen = collector()
    seen.observe("good", {"q_proj": 1.0, "down_proj": 20.0})
    for number in range(2):
        seen.observe(f"odd{number}", {"q_proj": 9.0, "down_proj": 20.0})
    assert seen.result().ranges == OFFLINE and [it.request for it in seen.result().rejections] == ["odd0", "odd1"]


def test_observe_refuses_other_layers() -> None:
    with pytest.raises(ConfigError, match="differ in layers: down_proj"):
        collector().observe("a", {"q_proj": 1.0})


def test_bounds_must_enclose_the_offline_range() -> None:
    with pytest.raises(ConfigError, match=r"must enclose 1"):
        Bounds(lowest_ratio=1.5)


def test_warm_ranges_reads_only_as_many_requests_as_needed_and_stores_the_result(tmp_path: Path) -> None:
    store = DiskScaleStore(tmp_path)
    source = iter([(str(number), {"q_proj": 2.0, "down_proj": 31.0}) for number in range(5)])
    first = warm_ranges(store, "key", collector(3), source)
    assert len(list(source)) == 2 and first.origin == "measured"
    assert store.read("key") == {"q_proj": 2.0, "down_proj": 31.0}
    assert warm_ranges(store, "key", collector(3), iter(())).origin == "cached"


def test_warm_ranges_stores_nothing_when_too_few_requests_came(tmp_path: Path) -> None:
    found = warm_ranges(DiskScaleStore(tmp_path), "key", collector(3), [("a", {"q_proj": 2.0, "down_proj": 31.0})])
    assert found.origin == "measured" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("stored", [{"q_proj": 2.0, "down_proj": 61.0}, {"q_proj": 0.9, "down_proj": 30.0}, {"q_proj": 2.0}])
def test_warm_ranges_ignores_stored_ranges_beyond_the_bounds(stored: dict[str, float], tmp_path: Path) -> None:
    store = DiskScaleStore(tmp_path)
    store.write("key", stored)
    found = warm_ranges(store, "key", collector(1), [("a", {"q_proj": 2.1, "down_proj": 29.0})])
    assert found.origin == "measured" and found.ranges == {"q_proj": 2.1, "down_proj": 29.0}
