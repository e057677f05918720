"""Bytes and grids of the weight formats, against figures worked out by hand."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.registry import FORMATS
from model_optimizer.formats.weights.integer import _next_larger


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
        ("int5-g64", 5.25),
        ("int6-g64", 6.25),
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
    with pytest.raises(ConfigError, match=r"unknown weight format 'int7'.*int4-g64"):
        FORMATS.get("int7")


def test_quantize_in_two_bits_spans_minus_two_to_one() -> None:
    weight_OI = torch.tensor([[-3.0, 3.0, 1.0, 0.9, -1.1] + [0.0] * 27])
    tensor = FORMATS.get("int2-g32").quantize(weight_OI)
    assert tensor.scale_OG.item() == 2.0  # 3 / (2 - 1/2)
    assert tensor.codes_OI[0, :5].tolist() == [-2, 1, 0, 0, -1]


@pytest.mark.parametrize(("name", "bits"), [("int5-g64", 5), ("int6-g64", 6)])
@pytest.mark.parametrize("in_features", [64, 192, 576])
def test_five_and_six_bits_come_back_exactly_from_packed_words(name: str, bits: int, in_features: int) -> None:
    weight_OI = torch.randn(7, in_features, generator=torch.Generator().manual_seed(in_features))
    tensor = FORMATS.get(name).quantize(weight_OI)
    packed = pack_to_int32(tensor.codes_OI, bits)
    assert torch.equal(unpack_from_int32(packed, bits, tensor.codes_OI.shape), tensor.codes_OI)
    stored = packed.numel() * 4 + tensor.scale_OG.numel() * 2
    assert stored == FORMATS.get(name).num_bytes(7, in_features)


def test_five_bits_give_the_values_that_compressed_tensors_gives() -> None:
    weight_OI = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    for name, bits in (("int5-g64", 5), ("int6-g64", 6)):
        tensor = FORMATS.get(name).quantize(weight_OI)
        arguments = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=64)
        theirs_OI = fake_quantize(weight_OI, tensor.scale_OG.float(), None, arguments)
        assert FORMATS.get(name).dequantize(tensor) == pytest.approx(theirs_OI, abs=1e-6)


def test_the_next_larger_float16_equals_nextafter() -> None:
    values = torch.logspace(-4, 4, 4001).to(torch.float16)
    assert torch.equal(_next_larger(values), torch.nextafter(values, torch.full_like(values, torch.inf)))
