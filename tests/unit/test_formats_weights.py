"""Bytes and grids of the weight formats, against figures worked out by hand."""

import pytest
import torch

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.registry import FORMATS


@pytest.mark.parametrize(
    ("name", "bits_per_weight"),
    [
        ("int2-g32", 2.5),
        ("int2-g64", 2.25),
        ("int3-g32", 3.5),
        ("int3-g64", 3.25),
        ("int4-g32", 4.5),
        ("int4-g64", 4.25),
        ("int4-g128", 4.125),
        ("int8-channel", 8.125),
        ("float32", 32),
    ],
)
def test_num_bytes_counts_scales(name: str, bits_per_weight: float) -> None:
    assert 8 * FORMATS.get(name).num_bytes(128, 128) / 128**2 == bits_per_weight


def test_num_bytes_counts_the_padding_of_the_last_word() -> None:
    assert FORMATS.get("int8-channel").num_bytes(3, 5) == 3 * (8 + 2)


def test_quantize_gives_the_codes_worked_out_by_hand() -> None:
    weight_OI = torch.tensor([[7.5, -7.5, 1.0, 0.4] + [0.0] * 28, [0.0] * 32])
    tensor = FORMATS.get("int4-g32").quantize(weight_OI)
    assert tensor.scale_OG.tolist() == [[1.0], [2.0**-14]]
    assert tensor.codes_OI[0, :4].tolist() == [7, -8, 1, 0]  # 7.5 rounds to 8, which the grid has not


def test_quantize_rounds_the_scale_up_to_float16() -> None:
    absmax = 127.5 * (1 + 2.0**-12)  # the step 1 + 2^-12 lies between the float16 neighbours 1 and 1 + 2^-10
    assert FORMATS.get("int8-channel").quantize(torch.tensor([[absmax, 1.0]])).scale_OG.item() == 1 + 2.0**-10


def test_quantize_refuses_a_scale_beyond_float16() -> None:
    with pytest.raises(UnsupportedError, match="does not fit float16"):
        FORMATS.get("int4-g32").quantize(torch.full((1, 32), 1e6))


def test_get_names_the_known_formats_when_unknown() -> None:
    with pytest.raises(ConfigError, match=r"unknown weight format 'int5'.*int4-g64"):
        FORMATS.get("int5")


def test_quantize_in_two_bits_spans_minus_two_to_one() -> None:
    weight_OI = torch.tensor([[-3.0, 3.0, 1.0, 0.9, -1.1] + [0.0] * 27])
    tensor = FORMATS.get("int2-g32").quantize(weight_OI)
    assert tensor.scale_OG.item() == 2.0  # 3 / (2 - 1/2)
    assert tensor.codes_OI[0, :5].tolist() == [-2, 1, 0, 0, -1]
