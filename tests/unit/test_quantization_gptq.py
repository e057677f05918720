"""GPTQ against plain rounding, against the best codes found by trying all, and where it must change nothing."""

import itertools

import pytest
import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.registry import FORMATS
from model_optimizer.quantization.descent import Objective, descend
from model_optimizer.quantization.hessian import damping, factor, factor_in_place, inverse_factor, rounding_order
from model_optimizer.quantization.methods import gptq
from model_optimizer.quantization.methods.gptq import compensated_codes, fit_scales, search_scales
from model_optimizer.quantization.registry import METHODS

GPTQ = METHODS.get("gptq")


def correlated_moment_II(num_inputs: int, seed: int) -> torch.Tensor:
    """Return the moment of inputs that share a few strong directions, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    mixing_RI = torch.randn(num_inputs // 8, num_inputs, generator=generator)
    inputs_NI = torch.randn(4096, num_inputs // 8, generator=generator) @ mixing_RI
    inputs_NI += 0.5 * torch.randn(4096, num_inputs, generator=generator)
    return inputs_NI.T @ inputs_NI / 4096


def objective(weight: torch.Tensor, moment_II: torch.Tensor) -> Objective:
    return Objective(weight, moment_II, damping(moment_II).float())


def weight_OI(num_outputs: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed))


def output_error(weight: torch.Tensor, moment_II: torch.Tensor, restored: torch.Tensor) -> float:
    """Return tr(dW M dW^T) / tr(W M W^T), the squared output error over the squared output."""
    error = (restored - weight).double()
    return (((error @ moment_II.double()) * error).sum() / ((weight @ moment_II) * weight).sum()).item()


@pytest.mark.parametrize(
    ("format_name", "most"), [("int2-g64", 0.45), ("int3-g64", 0.35), ("int4-g64", 0.35), ("int8-channel", 0.35)]
)
def test_quantize_errs_far_less_than_plain_rounding_on_correlated_inputs(format_name: str, most: float) -> None:
    weight, moment_II, weight_format = weight_OI(48, 192), correlated_moment_II(192, 7), FORMATS.get(format_name)
    plain = output_error(weight, moment_II, weight_format.round_trip(weight))
    mended = output_error(weight, moment_II, weight_format.dequantize(GPTQ.quantize(weight, weight_format, moment_II)))
    assert 0 < mended < most * plain


@pytest.mark.parametrize("format_name", ["int2-g32", "int4-g64", "int8-channel"])
def test_compensated_codes_are_the_nearest_ones_when_inputs_are_independent(format_name: str) -> None:
    weight, weight_format = weight_OI(16, 256), FORMATS.get(format_name)
    plain = weight_format.quantize(weight)
    order_I = rounding_order(torch.ones(256))
    codes_OI = compensated_codes(weight, weight_format, plain.scale_OG, order_I, inverse_factor(torch.eye(256), order_I)[0])
    assert torch.equal(codes_OI.to(torch.int8), plain.codes_OI)


def test_quantize_errs_no_more_than_plain_rounding_when_inputs_are_independent() -> None:
    weight, weight_format = weight_OI(16, 256), FORMATS.get("int4-g64")
    mended = weight_format.dequantize(GPTQ.quantize(weight, weight_format, torch.eye(256)))
    assert (mended - weight).norm() < (weight_format.round_trip(weight) - weight).norm()


def test_inverse_factor_is_the_upper_root_of_the_inverse() -> None:
    moment_II = correlated_moment_II(64, 3)
    order_I = rounding_order(moment_II.diagonal())
    factor_II, added_I = inverse_factor(moment_II, order_I)
    hessian_II = (moment_II.double() + added_I.diag())[order_I][:, order_I]
    assert torch.equal(factor_II, factor_II.triu())
    diagonal_I = moment_II.diagonal()
    assert added_I.tolist() == pytest.approx((0.015 * (diagonal_I.mean() + diagonal_I)).tolist())
    torch.testing.assert_close(factor_II.double().T @ factor_II.double(), torch.linalg.inv(hessian_II), rtol=1e-4, atol=1e-5)


def test_both_factors_agree_and_both_see_that_a_matrix_is_not_definite() -> None:
    moment_II = correlated_moment_II(96, seed=4)
    order_I, added_I = rounding_order(moment_II.diagonal()), damping(moment_II)
    here_II, there_II = (found(moment_II, added_I, order_I) for found in (factor_in_place, factor))
    assert here_II is not None and there_II is not None
    torch.testing.assert_close(here_II, there_II, rtol=1e-6, atol=1e-7)
    indefinite_II = moment_II - 2 * torch.eye(96) * moment_II.diagonal().max()
    assert factor_in_place(indefinite_II, added_I, order_I) is None
    assert factor(indefinite_II, added_I, order_I) is None


def test_inverse_factor_damps_more_until_the_moment_is_definite() -> None:
    """One direction of -0.05 means is past 3 % of damping and within 30 %."""
    moment_II = torch.eye(32)
    moment_II[4, 4] = -0.05
    _, added_I = inverse_factor(moment_II, torch.arange(32))
    mean = (31 - 0.05) / 32
    assert added_I.tolist() == pytest.approx([0.15 * (mean + (-0.05 if index == 4 else 1)) for index in range(32)])


def test_inverse_factor_refuses_a_moment_that_no_damping_mends() -> None:
    with pytest.raises(UnsupportedError, match="32 features is not positive definite"):
        inverse_factor(torch.full((32, 32), torch.nan), torch.arange(32))


def test_compensated_codes_follow_the_textbook_recursion() -> None:
    """One column at a time, the inverse of the remaining Hessian taken afresh: no factor, no blocks."""
    weight, weight_format = weight_OI(5, 192, seed=4), FORMATS.get("int3-g64")
    scale_OG, moment_II = weight_format.quantize(weight).scale_OG, correlated_moment_II(192, 5)
    hessian_II = moment_II.double() + damping(moment_II).diag()
    scale_OI = scale_OG.double().repeat_interleave(64, dim=1)
    left, expected = weight.double().clone(), torch.zeros_like(weight)
    order = hessian_II.diagonal().argsort(descending=True, stable=True).tolist()
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = torch.linalg.inv(hessian_II[rest][:, rest])
        expected[:, column] = torch.round(left[:, column] / scale_OI[:, column]).clamp(-4, 3)
        error = left[:, column] - expected[:, column] * scale_OI[:, column]
        left[:, rest] -= torch.outer(error, inverse[0] / inverse[0, 0])
    order_I = rounding_order(moment_II.diagonal())
    found = compensated_codes(weight, weight_format, scale_OG, order_I, inverse_factor(moment_II, order_I)[0])
    assert (found != expected).float().mean().item() < 0.01  # float32 may break a tie the other way


def test_quantize_comes_close_to_the_best_codes_of_all() -> None:
    """All 4^6 codes of six inputs are tried at the scales that the method chose."""
    weight, weight_format, width = weight_OI(24, 32, seed=9), FORMATS.get("int2-g32"), 6
    weight[:, width:] = 0
    moment_II = correlated_moment_II(32, 11)
    moment_II[width:] = moment_II[:, width:] = 0
    tensor = GPTQ.quantize(weight, weight_format, moment_II)
    codes_CI = torch.tensor(list(itertools.product(range(-2, 2), repeat=width)), dtype=torch.float32)
    values_OCI = codes_CI[None] * tensor.scale_OG.float()[:, :1, None]
    error_OCI = values_OCI - weight[:, None, :width]
    best = (error_OCI @ moment_II[:width, :width] * error_OCI).sum(-1).amin(1).sum().item()
    error_OI = weight_format.dequantize(tensor) - weight
    mine = (error_OI @ moment_II * error_OI).sum().item()
    plain_OI = weight_format.round_trip(weight) - weight
    plain = (plain_OI @ moment_II * plain_OI).sum().item()
    assert best <= mine * (1 + 1e-5) and mine < 1.3 * best and mine < 0.6 * plain


def test_quantize_stays_near_plain_rounding_for_inputs_that_calibration_never_saw() -> None:
    weight, weight_format = weight_OI(8, 64), FORMATS.get("int4-g64")
    plain = (weight_format.round_trip(weight) - weight).norm()
    unseen = weight_format.dequantize(GPTQ.quantize(weight, weight_format, torch.zeros(64, 64)))
    assert (unseen - weight).norm() <= plain
    moment_II = correlated_moment_II(64, 1)
    moment_II[7] = moment_II[:, 7] = 0
    tensor = GPTQ.quantize(weight, weight_format, moment_II)
    error_O = (weight_format.dequantize(tensor) - weight)[:, 7].abs()
    assert (error_O <= 2 * tensor.scale_OG.float()[:, 0].abs()).all()


def test_fit_scales_finds_the_scales_that_made_the_weight() -> None:
    generator = torch.Generator().manual_seed(6)
    codes_OI = torch.randint(-8, 8, (20, 192), generator=generator).float()
    scale_OG = (torch.rand(20, 3, generator=generator) + 0.5).half()
    weight = codes_OI * scale_OG.float().repeat_interleave(64, dim=1)
    assert torch.equal(fit_scales(objective(weight, correlated_moment_II(192, 8)), codes_OI, torch.ones(20, 3).half()), scale_OG)


def test_search_scales_turns_the_grid_where_its_longer_side_serves() -> None:
    weight_format = FORMATS.get("int2-g32")
    weight_OI = torch.tensor([[2.0, 1.0, 0.0, -1.0] * 8, [-2.0, -1.0, 0.0, 1.0] * 8])  # on a grid of step 1, turned or not
    scale_OG = search_scales(weight_OI, weight_format, torch.ones(32), weight_format.quantize(weight_OI))
    assert [round(value, 2) for (value,) in scale_OG.tolist()] == [-1.0, 1.0]  # 2 / 1.5 is the spanning step, 0.75 of it is 1


def test_search_scales_keeps_scales_positive_where_the_format_asks_for_it() -> None:
    weight_format = FORMATS.get("int8-channel")
    weight_OI = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    assert (search_scales(weight_OI, weight_format, torch.ones(64), weight_format.quantize(weight_OI)) > 0).all()


def test_fit_scales_finds_turned_scales_that_made_the_weight() -> None:
    generator = torch.Generator().manual_seed(6)
    codes_OI = torch.randint(-8, 8, (20, 192), generator=generator).float()
    scale_OG = ((torch.rand(20, 3, generator=generator) + 0.5) * torch.tensor([1.0, -1.0, -1.0])).half()
    weight = codes_OI * scale_OG.float().repeat_interleave(64, dim=1)
    found_OG = fit_scales(objective(weight, correlated_moment_II(192, 8)), codes_OI, scale_OG.sign())
    assert torch.equal(found_OG, scale_OG)


def test_fit_scales_keeps_a_row_whose_best_scale_would_turn_or_be_absent() -> None:
    codes_OI, scale_OG = torch.ones(2, 64), torch.tensor([[0.5, 0.25], [0.5, 0.25]]).half()
    codes_OI[1, 32:] = 0  # a group without a code other than zero has no best scale
    weight = torch.tensor([[-1.0], [2.0]]).expand(2, 64)
    fitted_OG = fit_scales(objective(weight, torch.eye(64)), codes_OI, scale_OG)
    assert fitted_OG.tolist() == [[0.5, 0.25], [2.0, 0.25]]


@pytest.mark.parametrize("format_name", ["int2-g64", "int4-g64", "int8-channel"])
def test_descend_never_raises_the_loss_of_an_output(format_name: str) -> None:
    weight, weight_format = weight_OI(40, 192, seed=12), FORMATS.get(format_name)
    goal, plain = objective(weight, correlated_moment_II(192, 13)), weight_format.quantize(weight)
    codes_OI = plain.codes_OI.float()
    scale_OI = plain.scale_OG.float().repeat_interleave(192 // plain.scale_OG.shape[1], dim=1)
    before_O = goal.loss(codes_OI * scale_OI - weight)
    for _ in range(3):
        codes_OI = descend(goal, codes_OI, plain.scale_OG, weight_format)
        after_O = goal.loss(codes_OI * scale_OI - weight)
        assert (after_O <= before_O * (1 + 1e-4)).all()
        before_O = after_O
    assert torch.equal(codes_OI, codes_OI.round()) and codes_OI.abs().max() <= 2 ** (weight_format.bits - 1)


def test_descend_ends_where_no_single_code_can_be_bettered() -> None:
    """Every other code of every input is tried by itself."""
    weight, weight_format = weight_OI(6, 64, seed=14), FORMATS.get("int2-g64")
    goal, plain = objective(weight, correlated_moment_II(64, 15)), weight_format.quantize(weight)
    codes_OI = plain.codes_OI.float()
    for _ in range(20):
        codes_OI = descend(goal, codes_OI, plain.scale_OG, weight_format)
    step_O1 = plain.scale_OG.float()
    reached_O = goal.loss(codes_OI * step_O1 - weight)
    for index in range(64):
        for code in range(-2, 2):
            other_OI = codes_OI.clone()
            other_OI[:, index] = code
            assert (goal.loss(other_OI * step_O1 - weight) >= reached_O * (1 - 1e-5)).all()


def test_quantize_does_not_change_the_weight_it_is_given() -> None:
    weight, moment_II = weight_OI(8, 64), correlated_moment_II(64, 2)
    before, moment_before = weight.clone(), moment_II.clone()
    found: QuantizedTensor = GPTQ.quantize(weight, FORMATS.get("int4-g32"), moment_II)
    assert torch.equal(weight, before) and torch.equal(moment_II, moment_before)
    assert found.codes_OI.is_contiguous() and found.scale_OG.is_contiguous()


def test_quantize_gives_the_same_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs do not depend on each other; products of other heights may add in another order and break a tie."""
    weight, moment_II, weight_format = weight_OI(40, 128), correlated_moment_II(128, 16), FORMATS.get("int3-g64")
    whole = GPTQ.quantize(weight, weight_format, moment_II)
    monkeypatch.setitem(gptq.CHUNK_ELEMENTS, "cpu", 7 * 128)
    chunked = GPTQ.quantize(weight, weight_format, moment_II)
    assert (whole.codes_OI != chunked.codes_OI).float().mean().item() < 0.01
    assert chunked.codes_OI.shape == (40, 128) and chunked.scale_OG.shape == (40, 2)
