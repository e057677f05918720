"""Inputs that are zero in all of calibration: the solver succeeds, rounds their weights to nearest, and counts them."""

import logging

import pytest
import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.hessian import damping, inverse_factor, rounding_order
from model_optimizer.quantization.registry import METHODS
from model_optimizer.quantization.unreached import quantize_reached, unreached_warnings

# QA-011
INPUTS_NI = torch.tensor([[1.0, 0, 2, 0], [0, 0, 1, 0], [2, 0, 0, 0], [1, 0, 1, 0]])
GPTQ = METHODS.get("gptq")


def weight_OI(num_inputs: int) -> torch.Tensor:
    return torch.randn(3, num_inputs, generator=torch.Generator().manual_seed(0))


def test_the_case_is_not_definite_until_it_is_damped() -> None:
    moment_II = INPUTS_NI.T @ INPUTS_NI / 4
    assert (2 * moment_II).diagonal().tolist() == [3, 0, 3, 0]
    assert torch.linalg.cholesky_ex(moment_II).info > 0
    assert torch.equal(damping(moment_II, 0.01).double()[[0, 2]], 0.005 * torch.tensor([0.75 + 1.5, 0.75 + 1.5]).double())
    assert damping(moment_II, 0.01)[1] == pytest.approx(0.005 * 0.75 + 0.75)
    factor_II, _ = inverse_factor(moment_II, rounding_order(moment_II.diagonal()))
    assert torch.isfinite(factor_II).all() and (factor_II.diagonal() > 0).all()


@pytest.mark.parametrize(("format_name", "times"), [("int8-channel", 1), ("int4-g32", 8), ("int3-g32", 8)])
def test_gptq_rounds_dead_inputs_to_nearest_and_counts_them(
    format_name: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    inputs_NI = INPUTS_NI.repeat(1, times)
    weight, weight_format = weight_OI(4 * times), FORMATS.get(format_name)
    with caplog.at_level(logging.INFO, logger="model_optimizer.quantization.hessian"):
        tensor = GPTQ.quantize(weight, weight_format, inputs_NI.T @ inputs_NI / 4)
    assert torch.isfinite(weight_format.dequantize(tensor)).all()
    nearest_OI = weight_format.nearest_codes(weight, tensor.scale_OG.float().repeat_interleave(4 * times, dim=1))
    dead = torch.arange(4 * times) % 2 == 1
    assert torch.equal(tensor.codes_OI[:, dead].float(), nearest_OI[:, dead])
    assert nearest_OI[:, dead].any()
    assert f"{2 * times} of {4 * times} inputs are zero in all of calibration" in caplog.text


def test_a_layer_without_any_input_is_rounded_to_nearest() -> None:
    weight, weight_format = weight_OI(64), FORMATS.get("int4-g32")
    tensor, nearest = quantize_reached(GPTQ, weight, weight_format, torch.zeros(64, 64)), weight_format.quantize(weight)
    assert torch.equal(tensor.codes_OI, nearest.codes_OI) and torch.equal(tensor.scale_OG, nearest.scale_OG)
    (warning,) = unreached_warnings(["model.layers.0.mlp.down_proj"])
    assert warning.startswith("1 layers saw nothing but zeros in calibration and are rounded to nearest: model.layers.0.mlp.down")


def test_gptq_refuses_inputs_that_are_not_finite() -> None:
    moment_II = torch.eye(64)
    moment_II[3, 3] = torch.nan
    with pytest.raises(UnsupportedError, match="not positive definite"):
        quantize_reached(GPTQ, weight_OI(64), FORMATS.get("int4-g32"), moment_II)
