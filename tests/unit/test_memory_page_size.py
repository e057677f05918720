"""The page size: the rule on figures made by hand, the measurement's shape, and its cache."""

from pathlib import Path

import pytest

from model_optimizer.memory.kv_layout import KvLayerShape, KvLayout
from model_optimizer.memory.page_size import (
    CANDIDATES,
    PageSizeFigure,
    cached_page_sizes,
    choose_page_tokens,
    measure_page_sizes,
    typical_tokens,
    waste_ratio,
)
from model_optimizer.spec import Lengths, Traffic

LAYOUT = KvLayout((KvLayerShape(2, 16, 16),) * 4, 16)


def figures(times: dict[int, float], num_tokens: int) -> list[PageSizeFigure]:
    return [
        PageSizeFigure(page_tokens=size, read_ns_per_token=time, waste_ratio=waste_ratio(num_tokens, size))
        for size, time in times.items()
    ]


def test_waste_ratio_is_half_a_page_less_half_a_token() -> None:
    # a page of 4: 0, 1, 2 or 3 empty slots, 1.5 on average, beside 98.5 tokens
    assert waste_ratio(98, 5) == pytest.approx(2 / 100)
    assert waste_ratio(10, 1) == 0


@pytest.mark.parametrize(
    ("times", "num_tokens", "expected"),
    [
        ({8: 100, 16: 80, 32: 60, 64: 50, 128: 49}, 2000, 64),  # 128 is not 5 % faster
        ({8: 100, 16: 80, 32: 60, 64: 50, 128: 30}, 2000, 128),
        ({8: 100, 16: 80, 32: 60, 64: 50, 128: 30}, 500, 32),  # 64 wastes 5.9 %
        ({8: 100, 16: 98, 32: 97, 64: 96, 128: 95}, 2000, 16),  # within 5 % of the fastest
        ({8: 100, 16: 50, 32: 40, 64: 30, 128: 20}, 50, 8),  # all waste too much: 8 wastes 6.5 %
    ],
)
def test_choose_page_tokens_takes_the_fastest_frugal_size(times: dict[int, float], num_tokens: int, expected: int) -> None:
    decision = choose_page_tokens(figures(times, num_tokens))
    assert (decision.choice, decision.numbers["page_tokens"]) == (f"{expected} tokens", expected)
    assert decision.numbers["read_ns_per_token_32"] == times[32]


def test_typical_tokens_is_the_median_prompt_and_half_of_the_median_output() -> None:
    traffic = Traffic(prompt_tokens=Lengths(p50=64, p95=100, max=200), output_tokens=Lengths(p50=33, p95=60, max=90))
    assert typical_tokens(traffic) == 80


def test_measure_page_sizes_times_every_candidate() -> None:
    measured = measure_page_sizes(LAYOUT, 100)
    assert tuple(it.page_tokens for it in measured) == CANDIDATES
    assert all(0 < it.read_ns_per_token < 1e6 for it in measured)
    assert [it.waste_ratio for it in measured] == [waste_ratio(100, size) for size in CANDIDATES]


def test_cached_page_sizes_measures_once_for_each_layer_and_length(tmp_path: Path) -> None:
    cache = tmp_path / "page_sizes.json"
    first = cached_page_sizes(cache, LAYOUT, 100)
    assert cached_page_sizes(cache, LAYOUT, 100) == first
    cached_page_sizes(cache, LAYOUT, 50)
    assert cached_page_sizes(cache, LAYOUT, 100) == first
    cache.write_text("{")
    assert len(cached_page_sizes(cache, LAYOUT, 100)) == len(CANDIDATES)
