"""Bits and runtimes become candidates; what cannot be is named, with what is known."""

import pytest

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.quantization.layers import LinearLayer
from model_optimizer.strategy.config import ScanConfig
from model_optimizer.strategy.space import candidates, grouped_format, recipe, true_bits

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


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("widths", "expected"), [((576, 1536), "g64"), ((96, 64), "g32"), ((128, 256), "g64")])
def test_grouped_format_takes_the_largest_group_up_to_64_that_divides_every_width(
    bits: int, widths: tuple[int, ...], expected: str
) -> None:
    assert grouped_format(bits, tuple(LinearLayer(str(width), 8, width) for width in widths)) == f"int{bits}-{expected}"


def test_grouped_format_refuses_widths_that_no_group_divides() -> None:
    with pytest.raises(ConfigError, match=r"no int3 group fits the input widths \[100\]"):
        grouped_format(3, (LinearLayer("a", 8, 100),))


def test_candidates_are_doubled_where_methods_differ() -> None:
    space = candidates(ScanConfig(bits=(4, 6, 8, 32), methods=("rtn", "gptq"), runtimes=("torch",)), LAYERS)
    assert [strategy.label for strategy in space.strategies] == [
        "float32/torch",
        "int8-channel-rtn/torch",
        "mixed-6.0bits-rtn/torch",
        "mixed-6.0bits-gptq/torch",
        "int4-g64-rtn/torch",
        "int4-g64-gptq/torch",
    ]
    assert space.pinned is None and space.unsupported == {}
    logged = {decision.subject: decision for decision in space.decisions}
    assert (
        logged["method of int8-channel"].choice == "rtn"
        and "gptq would only cost time" in logged["method of int8-channel"].because
    )


def test_candidates_keep_8_bits_plain_when_only_gptq_is_asked_for() -> None:
    space = candidates(ScanConfig(bits=(2, 8, 32), methods=("gptq",), runtimes=("torch",)), LAYERS)
    assert [it.label for it in space.strategies] == ["float32/torch", "int8-channel-rtn/torch", "int2-g64-gptq/torch"]


def test_pinned_precision_leaves_the_baselines_and_that_format() -> None:
    config = ScanConfig(bits=(4, 8), methods=("rtn", "gptq"), runtimes=("torch", "onnxruntime"))
    space = candidates(config, LAYERS, "int2-g64")
    assert [strategy.label for strategy in space.strategies] == [
        "float32/torch",
        "float32/onnxruntime",
        "int2-g64-rtn/torch",
        "int2-g64-rtn/onnxruntime",
        "int2-g64-gptq/torch",
        "int2-g64-gptq/onnxruntime",
    ]
    assert space.pinned == "int2-g64"
    decision = next(it for it in space.decisions if it.subject == "precision")
    assert decision.choice == "int2-g64" and "scan.bits is ignored" in decision.because
    assert decision.numbers == {"bits": 2, "num_ignored_bits": 2}


@pytest.mark.parametrize(
    ("precision", "labels"),
    [("float32", ["float32/torch"]), ("int8-channel", ["float32/torch", "int8-channel-rtn/torch"])],
)
def test_pinned_precision_repeats_nothing_where_methods_agree(precision: str, labels: list[str]) -> None:
    space = candidates(ScanConfig(methods=("rtn", "gptq"), runtimes=("torch",)), LAYERS, precision)
    assert [strategy.label for strategy in space.strategies] == labels


def test_pinned_precision_is_refused_when_unknown_or_when_it_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"unknown weight format 'int5'; known: .*int2-g64"):
        candidates(ScanConfig(), LAYERS, "int5")
    with pytest.raises(UnsupportedError, match=r"int4-g128 does not fit a: in_features 576 .*formats that fit: .*int4-g64"):
        candidates(ScanConfig(), LAYERS, "int4-g128")


@pytest.mark.parametrize(
    ("bits", "formats"),
    [
        (2, ("int2-g64",)),
        (3, ("int3-g64",)),
        (2.25, ("int2-g64", "int3-g64", "int4-g64", "int8-channel")),
        (3.5, ("int2-g64", "int3-g64", "int4-g64", "int8-channel")),
        (4.2, ("int2-g64", "int3-g64", "int4-g64", "int8-channel")),
        (4.25, ("int4-g64", "int8-channel")),
    ],
)
def test_recipe_offers_low_bits_only_below_what_int4_needs(bits: float, formats: tuple[str, ...]) -> None:
    found = recipe(bits, LAYERS)
    assert (found.formats, found.bits_budget) == (formats, None if bits in (2, 3) else bits)


def test_true_bits_counts_the_scales() -> None:
    # 4 bits and one float16 per 64 weights
    assert true_bits("int4-g64", LAYERS) == pytest.approx(4 + 16 / 64)


def test_recipe_of_a_mixed_budget_offers_the_cheaper_format_first() -> None:
    mixed = recipe(5.5, LAYERS)
    assert (mixed.formats, mixed.bits_budget) == (("int4-g64", "int8-channel"), 5.5)


@pytest.mark.parametrize("bits", [1, 8.5, 16, 2.2])
def test_recipe_refuses_bits_without_a_format(bits: float) -> None:
    with pytest.raises(ConfigError, match=f"scan.bits holds {bits:g}"):
        recipe(bits, LAYERS)


def test_candidates_refuse_an_unknown_runtime_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown runtime 'onyx'; known: .*torch"):
        candidates(ScanConfig(runtimes=("onyx",)), LAYERS)


def test_candidates_refuse_a_space_without_a_baseline() -> None:
    with pytest.raises(ConfigError, match="must hold 32"):
        candidates(ScanConfig(bits=(4, 8), runtimes=("torch",)), LAYERS)
