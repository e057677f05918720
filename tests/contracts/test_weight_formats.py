"""Laws that every registered weight format keeps."""

import pytest
import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.registry import FORMATS

GRIDS = tuple(name for name in FORMATS.names() if FORMATS.get(name).on_grid)
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
    step_OI = tensor.scale_OG.float().repeat_interleave(IN_FEATURES // tensor.scale_OG.shape[1], dim=1)
    assert (error_OI <= step_OI * (0.5 + 1e-6)).all()


@pytest.mark.parametrize("name", GRIDS)
def test_quantize_returns_the_same_codes_when_the_weight_lies_on_the_grid(name: str) -> None:
    tensor = FORMATS.get(name).quantize(random_weight_OI(2))
    again = FORMATS.get(name).quantize(FORMATS.get(name).dequantize(tensor), tensor.scale_OG)
    assert torch.equal(again.codes_OI, tensor.codes_OI)


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
    codes_OI = FORMATS.get(name).quantize(random_weight_OI(6, 7.0)).codes_OI
    half = 2 ** (FORMATS.get(name).bits - 1)
    assert codes_OI.dtype is torch.int8
    assert -half <= codes_OI.min().item() and codes_OI.max().item() <= half - 1


@pytest.mark.parametrize("name", FORMATS.names())
def test_round_trip_equals_dequantize_of_quantize_or_the_weight_itself(name: str) -> None:
    weight_OI = random_weight_OI(7)
    weight_format = FORMATS.get(name)
    expected_OI = weight_format.dequantize(weight_format.quantize(weight_OI)) if weight_format.on_grid else weight_OI
    assert torch.equal(weight_format.round_trip(weight_OI), expected_OI)
