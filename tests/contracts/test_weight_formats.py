"""Laws that every registered weight format keeps."""

from dataclasses import replace

import pytest
import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.registry import FORMATS
from model_optimizer.formats.storage import SHAPE, STORAGES, from_parts, stored_parts, to_parts

GRIDS = tuple(name for name in FORMATS.names() if FORMATS.get(name).on_grid)
STORED = tuple(name for name in GRIDS if FORMATS.get(name).storage in STORAGES)
IN_FEATURES = 256


def random_weight_OI(seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(24, IN_FEATURES, generator=generator)


@pytest.mark.parametrize("name", FORMATS.names())
def test_format_is_filed_under_its_own_name(name: str) -> None:
    assert FORMATS.get(name).name == name


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_quantize_errs_by_at_most_half_a_stored_step(name: str, scale: float) -> None:
    weight_OI = random_weight_OI(1, scale)
    tensor = FORMATS.get(name).quantize(weight_OI)
    error_OI = (FORMATS.get(name).dequantize(tensor) - weight_OI).abs()
    scale_OI = tensor.scale_OG.float().repeat_interleave(IN_FEATURES // tensor.scale_OG.shape[1], dim=1)
    # neighbours of e4m3 lie 2^-9 apart near zero and at most an eighth of the smaller one elsewhere
    step_OI = torch.maximum(weight_OI.abs() / 8, scale_OI / 2**9) if FORMATS.get(name).code_dtype.is_floating_point else scale_OI
    assert (error_OI <= step_OI * (0.5 + 1e-6)).all()


@pytest.mark.parametrize("name", GRIDS)
def test_quantize_returns_the_same_codes_when_the_weight_lies_on_the_grid(name: str) -> None:
    tensor = FORMATS.get(name).quantize(random_weight_OI(2))
    again = FORMATS.get(name).quantize(FORMATS.get(name).dequantize(tensor), tensor.scale_OG, tensor.zero_OG)
    assert torch.equal(again.codes_OI.float(), tensor.codes_OI.float())


@pytest.mark.parametrize("name", GRIDS)
def test_quantize_keeps_zero_rows_finite_and_zero(name: str) -> None:
    weight_OI = random_weight_OI(3)
    weight_OI[5] = 0
    tensor = FORMATS.get(name).quantize(weight_OI)
    restored_OI = FORMATS.get(name).dequantize(tensor)
    assert torch.isfinite(tensor.scale_OG).all() and torch.isfinite(restored_OI).all()
    assert restored_OI[5].abs().max().item() == 0


@pytest.mark.parametrize("name", GRIDS)
def test_quantize_keeps_a_dead_input_column_zero(name: str) -> None:
    weight_OI = random_weight_OI(4)
    weight_OI[:, 7] = 0
    assert FORMATS.get(name).round_trip(weight_OI)[:, 7].abs().max().item() == 0


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_quantize_refuses_values_that_are_not_finite(name: str, poison: float) -> None:
    weight_OI = random_weight_OI(5)
    weight_OI[0, 0] = poison
    with pytest.raises(UnsupportedError, match="not finite"):
        FORMATS.get(name).quantize(weight_OI)


@pytest.mark.parametrize("name", GRIDS)
def test_codes_stay_in_the_range_of_their_bits(name: str) -> None:
    weight_format = FORMATS.get(name)
    tensor = weight_format.quantize(random_weight_OI(6, 7.0))
    half = 2 ** (weight_format.bits - 1)
    lowest, highest = (-448, 448) if weight_format.code_dtype.is_floating_point else (-half, half - 1)
    assert tensor.codes_OI.dtype is weight_format.code_dtype and tensor.scale_OG.dtype is weight_format.scale_dtype
    assert lowest <= tensor.codes_OI.float().min().item() and tensor.codes_OI.float().max().item() <= highest
    assert (tensor.zero_OG is None) == weight_format.symmetric
    if tensor.zero_OG is not None:
        assert tensor.zero_OG.dtype is torch.int8 and tensor.zero_OG.shape == tensor.scale_OG.shape
        assert -half <= tensor.zero_OG.min().item() and tensor.zero_OG.max().item() <= half - 1


@pytest.mark.parametrize("name", FORMATS.names())
def test_round_trip_equals_dequantize_of_quantize_or_the_weight_itself(name: str) -> None:
    weight_OI = random_weight_OI(7)
    weight_format = FORMATS.get(name)
    expected_OI = weight_format.dequantize(weight_format.quantize(weight_OI)) if weight_format.on_grid else weight_OI
    assert torch.equal(weight_format.round_trip(weight_OI), expected_OI)


@pytest.mark.parametrize("name", STORED)
def test_stored_parts_hold_exactly_what_was_quantized_in_the_bytes_that_num_bytes_says(name: str) -> None:
    weight_format = FORMATS.get(name)
    tensor = weight_format.quantize(random_weight_OI(8)[:21])  # rows that fill no whole word of zero points
    if weight_format.activation == "static-tensor":
        tensor = replace(tensor, input_scale=torch.tensor([0.25]))
    parts = to_parts(weight_format, tensor)
    stated = {part.suffix: (part.shape, part.num_bytes) for part in stored_parts(weight_format, 21, IN_FEATURES)}
    assert stated == {suffix: (tuple(part.shape), part.nbytes) for suffix, part in parts.items()}
    assert sum(part.nbytes for suffix, part in parts.items() if suffix != SHAPE) == weight_format.num_bytes(21, IN_FEATURES)
    found = from_parts(weight_format, parts)
    assert torch.equal(found.codes_OI.float(), tensor.codes_OI.float()) and torch.equal(found.scale_OG, tensor.scale_OG)
    assert torch.equal(weight_format.dequantize(found), weight_format.dequantize(tensor))
    assert found.input_scale is None or found.input_scale.tolist() == [0.25]


@pytest.mark.parametrize("name", GRIDS)
def test_weights_as_names_a_format_of_the_same_values(name: str) -> None:
    weight_OI, twin = random_weight_OI(9), FORMATS.get(FORMATS.get(name).weights_as)
    assert torch.equal(FORMATS.get(name).round_trip(weight_OI), twin.round_trip(weight_OI))
    assert twin.weights_as == twin.name
