"""Learned rounding against autograd through a straight-through rounding, the whole model, and a kill."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization.block_tuning import STATE, Tuning, tune_along
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.layers import read_layers
from model_optimizer.quantization.learned_rounding import LearnedRounding
from model_optimizer.quantization.parts import Parts
from model_optimizer.quantization.preflight import forecast

FORMAT = "int3-g32"
CONFIG = QuantizationConfig(tuning_steps=16, tuning_batch=2, tuning_sequences=8, tuning_tokens=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=3)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSource:
    path = tmp_path_factory.mktemp("calibration") / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills. " * 2}) for n in range(16)))
    return CalibrationSource.of(CalibrationConfig(path=path), path.parent)


def tune(
    model: Path,
    calibration: CalibrationSource,
    folder: Path,
    *,
    skip: str = " ",
    name: str = FORMAT,
    progress: Quiet | None = None,
) -> Parts:
    plan = {it.name: "float32" if skip in it.name else name for it in read_layers(model).linears}
    parts = Parts(folder / "parts")
    tune_along(Tuning.of(CONFIG, calibration, model, plan, parts), folder, progress or Quiet())
    return parts


def straight_through(values: torch.Tensor) -> torch.Tensor:
    return values + (values.round() - values).detach()


@pytest.mark.parametrize("name", ["int3-g32", "int4-g32-asym"])
def test_learn_follows_the_signs_that_autograd_finds_through_a_straight_through_rounding(name: str) -> None:
    weight_format, rate = FORMATS.get(name), 0.01
    weight_OI = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    inputs_NI, target_NO = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(2))[0], torch.zeros(40, 6)
    layer = LearnedRounding(weight_OI, weight_format)
    spanning = weight_format.quantize(weight_OI)
    step_OG1 = spanning.scale_OG.float()[..., None]
    if weight_format.signed_scale:
        largest_OG1 = weight_OI.reshape(6, 2, 32).gather(-1, weight_OI.reshape(6, 2, 32).abs().argmax(-1, keepdim=True))
        step_OG1 = (largest_OG1 / -(2.0 ** (weight_format.bits - 1))).half().float()
        assert (step_OG1 < 0).any() and (step_OG1 > 0).any()
    zero_OG1 = torch.zeros_like(step_OG1) if spanning.zero_OG is None else spanning.zero_OG.float()[..., None]
    half = 2 ** (weight_format.bits - 1)
    offset = torch.zeros(6, 2, 32)
    ratio = torch.full((6, 2, 1), 1.0)
    for _ in range(5):
        offset.requires_grad_(True)
        ratio.requires_grad_(True)
        code = straight_through(weight_OI.reshape(6, 2, 32) / step_OG1 / ratio + offset)
        bounded = torch.where(code > half - 1 - zero_OG1, half - 1 - zero_OG1, code)
        bounded = torch.where(code < -half - zero_OG1, -half - zero_OG1, bounded)
        rounded_OI = (bounded * step_OG1 * ratio).flatten(1)
        (inputs_NI @ rounded_OI.T - target_NO).square().sum().backward()
        leaf_OI = layer.weight()
        torch.testing.assert_close(leaf_OI.detach(), rounded_OI.detach())
        (inputs_NI @ leaf_OI.T - target_NO).square().sum().backward()
        assert leaf_OI.grad is not None and offset.grad is not None and ratio.grad is not None
        layer.learn(leaf_OI.grad, rate)
        offset = (offset - rate * offset.grad.sign()).detach()
        ratio = (ratio - rate * ratio.grad.sign()).detach()


def test_finished_gives_the_weight_that_was_learned_up_to_the_stored_step() -> None:
    layer = LearnedRounding(torch.randn(8, 64, generator=torch.Generator().manual_seed(3)), FORMATS.get(FORMAT))
    for seed in range(20):
        layer.learn(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)), 0.02)
    tensor = layer.finished()
    assert (tensor.codes_OI.dtype, tensor.scale_OG.dtype) == (torch.int8, torch.float16)
    assert not torch.equal(tensor.scale_OG, FORMATS.get(FORMAT).quantize(layer.weight().detach()).scale_OG)
    torch.testing.assert_close(FORMATS.get(FORMAT).dequantize(tensor), layer.weight().detach(), rtol=2**-10, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
def test_outermost_step_puts_the_largest_magnitude_on_the_outermost_code(sign: int) -> None:
    weight_OI = sign * torch.tensor([[0.5, -0.25, 0.125, 4.0] * 8])
    tensor = LearnedRounding(weight_OI, FORMATS.get("int3-g32")).finished()
    assert tensor.scale_OG.item() == -sign  # 4 / 2^2
    assert tensor.codes_OI[0, :4].tolist() == [0, 0, 0, -4]
    assert torch.equal(FORMATS.get("int3-g32").dequantize(tensor)[0, :4], sign * torch.tensor([0, 0, 0, 4.0]))


@torch.no_grad()
def test_tune_along_brings_the_outputs_of_the_last_block_nearer_than_plain_rounding(
    model: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    parts = tune(model, calibration, tmp_path)
    full = load_dequantized(model)
    tokens = [torch.tensor([it[:24]]) for it in prepare(calibration, model).samples[:8]]
    wanted = [full.base_model(input_ids=it).last_hidden_state for it in tokens]
    errors = {}
    for kind in ("learned", "nearest"):
        changed = load_dequantized(model)
        for layer in read_layers(model).linears:
            weight_OI = changed.get_parameter(f"{layer.name}.weight")
            tensor = parts.read(layer.name, FORMAT) if kind == "learned" else FORMATS.get(FORMAT).quantize(weight_OI)
            assert tensor is not None
            weight_OI.copy_(FORMATS.get(FORMAT).dequantize(tensor))
        outputs = [changed.base_model(input_ids=it).last_hidden_state for it in tokens]
        errors[kind] = sum((left - right).square().sum().item() for left, right in zip(outputs, wanted, strict=True))
    assert errors["learned"] < 0.7 * errors["nearest"]


def test_tune_along_leaves_layers_in_full_precision_alone_and_rounds_floating_grids_to_nearest(
    model: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    parts = tune(model, calibration, tmp_path, skip="o_proj", name="fp8-dynamic")
    name = "model.layers.1.mlp.up_proj"
    tensor = parts.read(name, "fp8-dynamic")
    expected = FORMATS.get("fp8-dynamic").quantize(load_dequantized(model).get_parameter(f"{name}.weight").detach())
    assert tensor is not None and torch.equal(tensor.codes_OI.float(), expected.codes_OI.float())
    assert not list((tmp_path / "parts").glob("*o_proj*"))


class Killed(BaseException):
    """Stands for SIGKILL."""


class KillAt(Quiet):
    """Raises before a block is taken up."""

    def __init__(self, block: int):
        self.block = block

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for item in items:
            if item == self.block:
                raise Killed
            yield item


def test_tune_along_continues_after_a_kill_with_the_same_bytes(
    model: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    tune(model, calibration, tmp_path / "whole")
    with pytest.raises(Killed):
        tune(model, calibration, tmp_path / "cut", progress=KillAt(2))
    assert (tmp_path / "cut" / STATE).is_file()
    tune(model, calibration, tmp_path / "cut")
    whole = {it.name: it.read_bytes() for it in (tmp_path / "whole" / "parts").iterdir()}
    cut = {it.name: it.read_bytes() for it in (tmp_path / "cut" / "parts").iterdir()}
    assert whole == cut and len(whole) == 21
    assert not (tmp_path / "cut" / STATE).exists() and not list((tmp_path / "cut").glob("*.bin"))


def test_forecast_counts_the_steps_of_signround(model: Path) -> None:
    layers = read_layers(model).linears
    recipe = WeightRecipe(method="signround", formats=("int4-g32",))
    few, many = (forecast(layers, recipe, CONFIG.model_copy(update={"tuning_steps": it})).seconds["tuning"] for it in (10, 1000))
    assert 20 < many / few < 400
