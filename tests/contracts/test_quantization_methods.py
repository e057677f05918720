"""Laws that every registered quantization method keeps."""

import pytest
import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.registry import METHODS

CASES = [(method, name) for method in METHODS.names() for name in FORMATS.names() if FORMATS.get(name).on_grid]


def random_weight_OI(in_features: int = 256) -> torch.Tensor:
    return torch.randn(16, in_features, generator=torch.Generator().manual_seed(0))


def quantize(method: str, weight_OI: torch.Tensor, format_name: str) -> QuantizedTensor:
    """Give the method what it says that it needs."""
    chosen = METHODS.get(method)
    inputs_NI = torch.randn(512, weight_OI.shape[1], generator=torch.Generator().manual_seed(1))
    moment_II = inputs_NI.T @ inputs_NI / 512 if chosen.needs_moments else None
    return chosen.quantize(weight_OI, FORMATS.get(format_name), moment_II)


@pytest.mark.parametrize(("method", "format_name"), CASES)
def test_quantize_is_deterministic(method: str, format_name: str) -> None:
    first, second = (quantize(method, random_weight_OI(), format_name) for _ in range(2))
    assert torch.equal(first.codes_OI.float(), second.codes_OI.float()) and torch.equal(first.scale_OG, second.scale_OG)
    assert first.zero_OG is None or torch.equal(first.zero_OG, second.zero_OG)


@pytest.mark.parametrize(("method", "format_name"), CASES)
def test_quantize_gives_the_formats_shapes_and_types(method: str, format_name: str) -> None:
    tensor = quantize(method, random_weight_OI(), format_name)
    groups = 256 // (FORMATS.get(format_name).group_size or 256)
    weight_format = FORMATS.get(format_name)
    assert (tensor.codes_OI.shape, tensor.codes_OI.dtype) == ((16, 256), weight_format.code_dtype)
    assert (tensor.scale_OG.shape, tensor.scale_OG.dtype) == ((16, groups), weight_format.scale_dtype)
    assert (tensor.zero_OG is None) == weight_format.symmetric
    assert tensor.zero_OG is None or (tensor.zero_OG.shape, tensor.zero_OG.dtype) == ((16, groups), torch.int8)


@pytest.mark.parametrize(("method", "format_name"), CASES)
def test_quantize_leaves_a_relative_error_that_its_bits_explain(method: str, format_name: str) -> None:
    weight_OI = random_weight_OI()
    weight_format = FORMATS.get(format_name)
    restored_OI = weight_format.dequantize(quantize(method, weight_OI, format_name))
    error_ratio = ((restored_OI - weight_OI).norm() / weight_OI.norm()).item()
    # a uniform error of one step has deviation step / sqrt(12); a Gaussian's step is at most 2 x 4.5 deviations / 2^bits
    # e4m3 has 3 bits after the leading one: an even error of 2^-4 of the weight at most, and GPTQ may double it
    bound = 2**-4 if weight_format.code_dtype.is_floating_point else 9 / 2**weight_format.bits / 12**0.5
    assert 0 < error_ratio < bound


@pytest.mark.parametrize("method", METHODS.names())
def test_quantize_refuses_a_group_that_does_not_divide(method: str) -> None:
    with pytest.raises(UnsupportedError, match=r"in_features 80 is not divisible by group 32 \(remainder 16\)"):
        quantize(method, random_weight_OI(80), "int4-g32")


@pytest.mark.parametrize(("method", "format_name"), CASES)
def test_quantize_keeps_codes_within_the_formats_bits_and_zero_rows_zero(method: str, format_name: str) -> None:
    weight_OI = random_weight_OI()
    weight_OI[3] = 0
    tensor = quantize(method, weight_OI, format_name)
    half = 2 ** (FORMATS.get(format_name).bits - 1)
    lowest, highest = (-448, 448) if tensor.codes_OI.dtype.is_floating_point else (-half, half - 1)
    assert lowest <= tensor.codes_OI.float().min().item() and tensor.codes_OI.float().max().item() <= highest
    assert FORMATS.get(format_name).dequantize(tensor)[3].abs().max().item() == 0
    assert (tensor.scale_OG != 0).all()
    if not FORMATS.get(format_name).signed_scale:
        assert (tensor.scale_OG > 0).all()
