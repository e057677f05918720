"""Ranges of round-to-nearest: what percentile and squared-error search gain over the largest magnitude; zero points in GPTQ."""

import pytest
import torch

from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.descent import Objective, descend
from model_optimizer.quantization.hessian import inverse_factor, rounding_order
from model_optimizer.quantization.methods import rtn_mse
from model_optimizer.quantization.methods.gptq import compensated_codes, fit_scales
from model_optimizer.quantization.registry import METHODS

ASYMMETRIC = ("int4-g32-asym", "int4-g64-asym")


def heavy_tailed_OI(rows: int = 64, columns: int = 512) -> torch.Tensor:
    """Student's t with 4 degrees of freedom: a Gaussian over the root of a mean of four squares."""
    generator = torch.Generator().manual_seed(5)
    squares = torch.randn(rows, columns, 4, generator=generator).square().mean(-1)
    return torch.randn(rows, columns, generator=generator) / squares.sqrt()


def correlated_moment_II(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs_NI = torch.randn(4 * size, size // 4, generator=generator) @ torch.randn(size // 4, size, generator=generator)
    inputs_NI += 0.5 * torch.randn(4 * size, size, generator=generator)
    return inputs_NI.T @ inputs_NI / len(inputs_NI)


def squared_error(weight_OI: torch.Tensor, format_name: str, tensor: QuantizedTensor) -> float:
    return (FORMATS.get(format_name).dequantize(tensor) - weight_OI).square().mean().item()


@pytest.mark.parametrize("method", ["rtn-mse", "rtn-percentile"])
@pytest.mark.parametrize(
    ("format_name", "most"), [("int2-g64", 0.75), ("int3-g64", 0.9), ("int4-g64", 0.97), ("int4-g64-asym", 0.99)]
)
def test_narrower_ranges_err_less_than_min_max_when_tails_are_heavy(method: str, format_name: str, most: float) -> None:
    weight_OI, weight_format = heavy_tailed_OI(), FORMATS.get(format_name)
    plain = squared_error(weight_OI, format_name, METHODS.get("rtn").quantize(weight_OI, weight_format))
    found = squared_error(weight_OI, format_name, METHODS.get(method).quantize(weight_OI, weight_format))
    assert found < most * plain


@pytest.mark.parametrize("format_name", ["int2-g32", "int4-g64", "int4-g32-asym", "int8-channel", "fp8-dynamic"])
def test_rtn_mse_never_errs_more_than_min_max_in_any_group(format_name: str) -> None:
    weight_OI, weight_format = heavy_tailed_OI(), FORMATS.get(format_name)
    plain = weight_format.quantize(weight_OI)
    found = METHODS.get("rtn-mse").quantize(weight_OI, weight_format)
    plain_OG, found_OG = (
        (weight_format.dequantize(it) - weight_OI).reshape(*plain.scale_OG.shape, -1).square().sum(-1) for it in (plain, found)
    )
    assert (found_OG <= plain_OG * (1 + 1e-5)).all()
    assert (found_OG < 0.999 * plain_OG).any() or format_name == "int8-channel"  # 8 bits have steps to spare


def test_rtn_percentile_cuts_at_the_interpolated_magnitude() -> None:
    weight_OI = torch.arange(1.0, 65.0)[None] * torch.tensor([1.0, -1.0]).repeat(32)
    tensor = METHODS.get("rtn-percentile").quantize(weight_OI, FORMATS.get("int2-g64"))
    kept = 1 + 63 * (1 - 0.3 / 9)  # of 64 magnitudes 1 .. 64 that lie evenly
    assert tensor.scale_OG.item() == pytest.approx(kept / 1.5, rel=2**-10)


@pytest.mark.parametrize("format_name", ASYMMETRIC)
def test_gptq_with_zero_points_gives_a_smaller_output_error_than_rounding(format_name: str) -> None:
    weight_OI = torch.randn(48, 192, generator=torch.Generator().manual_seed(2)) + 0.4
    moment_II, weight_format = correlated_moment_II(192, 7), FORMATS.get(format_name)
    tensor = METHODS.get("gptq").quantize(weight_OI, weight_format, moment_II)
    errors = [weight_format.dequantize(it) - weight_OI for it in (tensor, weight_format.quantize(weight_OI))]
    mended, plain = (((error_OI @ moment_II) * error_OI).sum().item() for error_OI in errors)
    assert mended < 0.5 * plain
    assert tensor.zero_OG is not None and tensor.codes_OI.min().item() >= -8 and tensor.codes_OI.max().item() <= 7


def test_zero_points_pay_for_themselves_under_gptq_when_weights_lie_off_center() -> None:
    weight_OI = torch.randn(48, 192, generator=torch.Generator().manual_seed(3)) + 1.0
    moment_II = correlated_moment_II(192, 8)
    loss = {}
    for name in ("int4-g64", "int4-g64-asym"):
        tensor = METHODS.get("gptq").quantize(weight_OI, FORMATS.get(name), moment_II)
        error_OI = FORMATS.get(name).dequantize(tensor) - weight_OI
        loss[name] = ((error_OI @ moment_II) * error_OI).sum().item()
    assert loss["int4-g64-asym"] < 0.7 * loss["int4-g64"]


def test_every_step_of_gptq_with_zero_points_keeps_codes_on_the_grid_and_never_raises_the_loss() -> None:
    weight_OI, weight_format = torch.randn(24, 128, generator=torch.Generator().manual_seed(4)) + 0.7, FORMATS.get(ASYMMETRIC[1])
    moment_II = correlated_moment_II(128, 9)
    order_I = rounding_order(moment_II.diagonal())
    factor_II, added_I = inverse_factor(moment_II, order_I)
    goal, spanning = Objective(weight_OI, moment_II, added_I.float()), weight_format.quantize(weight_OI)
    assert spanning.zero_OG is not None
    zero_OI = spanning.zero_OG.float().repeat_interleave(64, dim=1)
    steps_OI = compensated_codes(weight_OI, weight_format, spanning.scale_OG, order_I, factor_II, zero_OG=spanning.zero_OG)

    def loss_O(steps_OI: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
        return goal.loss(steps_OI * scale_OG.float().repeat_interleave(64, dim=1) - weight_OI)

    first_O = loss_O(steps_OI, spanning.scale_OG)
    scale_OG = fit_scales(goal, steps_OI, spanning.scale_OG)
    fitted_O = loss_O(steps_OI, scale_OG)
    steps_OI = descend(goal, steps_OI, scale_OG, weight_format, spanning.zero_OG)
    assert (fitted_O <= first_O * 1.001).all() and (loss_O(steps_OI, scale_OG) <= fitted_O * (1 + 1e-5)).all()
    codes_OI = steps_OI + zero_OI
    assert torch.equal(codes_OI, codes_OI.round()) and codes_OI.min().item() >= -8 and codes_OI.max().item() <= 7


@pytest.mark.parametrize("method", ["rtn-mse", "rtn-percentile"])
def test_rows_that_are_searched_together_do_not_change_the_result(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OI, weight_format = heavy_tailed_OI(), FORMATS.get("int4-g64-asym")
    whole = METHODS.get(method).quantize(weight_OI, weight_format)
    monkeypatch.setattr(rtn_mse, "CHUNK_ELEMENTS", 5 * 512)
    pieces = METHODS.get(method).quantize(weight_OI, weight_format)
    assert torch.equal(whole.codes_OI, pieces.codes_OI) and torch.equal(whole.scale_OG, pieces.scale_OG)
    assert whole.zero_OG is not None and pieces.zero_OG is not None and torch.equal(whole.zero_OG, pieces.zero_OG)
