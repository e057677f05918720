"""Bits and runtimes become candidates; what cannot be is named, with what is known."""

import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.quantization.layers import LinearLayer
from model_optimizer.strategy.config import ScanConfig
from model_optimizer.strategy.space import candidates, int4_format, recipe, true_bits

LAYERS = (LinearLayer("a", 64, 576), LinearLayer("b", 64, 1536))


def test_candidates_are_bits_times_runtimes_most_bits_first() -> None:
    space = candidates(ScanConfig(bits=(4, 6, 8, 32), runtimes=("torch", "tensorrt")), LAYERS)
    assert [strategy.label for strategy in space.strategies] == [
        "float32/torch",
        "float32/tensorrt",
        "int8-channel-rtn/torch",
        "int8-channel-rtn/tensorrt",
        "mixed-6.0bits-rtn/torch",
        "mixed-6.0bits-rtn/tensorrt",
        "int4-g64-rtn/torch",
        "int4-g64-rtn/tensorrt",
    ]
    assert set(space.unsupported) == {label for label in (s.label for s in space.strategies) if label.endswith("tensorrt")}
    assert "TensorRT" in space.unsupported["float32/tensorrt"]
    assert [decision.choice for decision in space.decisions] == ["int4-g64"]


def test_candidates_log_no_group_when_no_recipe_has_int4() -> None:
    assert candidates(ScanConfig(bits=(8, 32), runtimes=("torch",)), LAYERS).decisions == ()


@pytest.mark.parametrize(("widths", "expected"), [((576, 1536), "int4-g64"), ((96, 64), "int4-g32"), ((128, 256), "int4-g64")])
def test_int4_format_takes_the_largest_group_up_to_64_that_divides_every_width(widths: tuple[int, ...], expected: str) -> None:
    assert int4_format(tuple(LinearLayer(str(width), 8, width) for width in widths)) == expected


def test_int4_format_refuses_widths_that_no_group_divides() -> None:
    with pytest.raises(ConfigError, match=r"input widths \[100\]"):
        int4_format((LinearLayer("a", 8, 100),))


def test_true_bits_counts_the_scales() -> None:
    # 4 bits and one float16 per 64 weights
    assert true_bits("int4-g64", LAYERS) == pytest.approx(4 + 16 / 64)


def test_recipe_of_a_mixed_budget_offers_the_cheaper_format_first() -> None:
    mixed = recipe(5.5, LAYERS)
    assert (mixed.formats, mixed.bits_budget) == (("int4-g64", "int8-channel"), 5.5)


@pytest.mark.parametrize("bits", [3, 8.5, 16, 4.2])
def test_recipe_refuses_bits_without_a_format(bits: float) -> None:
    with pytest.raises(ConfigError, match=f"scan.bits holds {bits:g}"):
        recipe(bits, LAYERS)


def test_candidates_refuse_an_unknown_runtime_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown runtime 'onyx'; known: .*torch"):
        candidates(ScanConfig(runtimes=("onyx",)), LAYERS)


def test_candidates_refuse_a_space_without_a_baseline() -> None:
    with pytest.raises(ConfigError, match="must hold 32"):
        candidates(ScanConfig(bits=(4, 8), runtimes=("torch",)), LAYERS)
