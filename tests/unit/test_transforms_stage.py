"""Folded recipes through the quantize stage: what is written, what it is worth, and what the artifact says."""

from pathlib import Path

import pytest
import torch
from architecture_fixtures import FAMILIES
from safetensors.torch import load_file, save_file
from transform_fixtures import FORMAT, OUTLIERS, write_outlying, write_text

from model_optimizer.artifacts.base import Stage, Stored, Tree
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.formats.compressed_tensors import read_plan
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.models.headers import read_headers
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.logits_kl import kl_nats
from model_optimizer.quantization.shared import QuantizeInputs
from model_optimizer.quantization.stage import CHECKPOINT, UPPER_GUESS, quantize
from model_optimizer.quantization.transforms.fold import transforms_of
from model_optimizer.store import Store, stage_key

LOOSE = {
    "kl_breaker_nats": 1e9, "sensitivity_sequences": 1, "sensitivity_tokens": 16, "reallocation_sequences": 0,
    "moments_sequences": 6, "moments_tokens": 32, "rotation_seeds": 2, "distill_learning_rate": 1e-2, "distill_tokens": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_outlying(FAMILIES["llama"](True), tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSource:
    return write_text(tmp_path_factory.mktemp("calibration"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


def produce(
    model: Path, calibration: CalibrationSource, store: Store, recipe: WeightRecipe, **config: object
) -> Stored[QuantizedModel]:
    settings = QuantizationConfig.model_validate(LOOSE | config)
    inputs = QuantizeInputs(fingerprint="t", model=Tree.of(model), recipe=recipe, calibration=calibration, config=settings)
    return store.produce(
        Stage.QUANTIZE,
        stage_key(inputs),
        QuantizedModel,
        lambda workspace: quantize(inputs, workspace, store=store, progress=Quiet()),
    )


def recipe(method: str) -> WeightRecipe:
    return WeightRecipe.model_validate({"method": method, "formats": (FORMAT,)})


@torch.no_grad()
def held_out_kl_nats(model: Path, calibration: CalibrationSource, stored: Stored[QuantizedModel]) -> float:
    full, rounded = load_dequantized(model), load_dequantized(stored.directory / CHECKPOINT)
    texts = [torch.tensor([tokens]) for tokens in prepare(calibration, model).held_out]
    return sum(kl_nats(full(tokens).logits, rounded(tokens).logits).mean().item() for tokens in texts) / len(texts)


def test_transforms_of_orders_them() -> None:
    assert transforms_of("rtn", "none") == transforms_of("gptq", "none") == ()
    assert transforms_of("smoothquant", "none") == ("smoothquant",)
    assert transforms_of("awq", "residual") == ("rotate-residual", "rotate-heads", "awq")
    assert transforms_of("gptq", "heads") == ("rotate-heads",)


def test_quantize_with_awq_loses_less_than_plain_rounding(model: Path, calibration: CalibrationSource, store: Store) -> None:
    awq = produce(model, calibration, store, recipe("awq"))
    plain = produce(model, calibration, store, recipe("rtn"))
    ratio = held_out_kl_nats(model, calibration, awq) / held_out_kl_nats(model, calibration, plain)
    assert ratio < 0.8
    assert set(read_plan(awq.directory / CHECKPOINT).values()) == {FORMAT} and len(awq.artifact.plan) == 14
    assert awq.artifact.coverage.true_bits_per_weight == plain.artifact.coverage.true_bits_per_weight == 4.5
    assert awq.artifact.coverage.checkpoint_bytes == plain.artifact.coverage.checkpoint_bytes
    assert [decision.subject for decision in awq.artifact.decisions if "awq" in decision.subject] == ["awq"]
    predicted = next(it for it in awq.artifact.measures if it.name == "predicted_kl")
    assert predicted.reason.endswith(UPPER_GUESS) and predicted.value > 0


def test_quantize_with_a_rotated_residual_counts_the_untied_head(
    model: Path, calibration: CalibrationSource, store: Store
) -> None:
    rotated = produce(model, calibration, store, recipe("rtn"), rotation="residual")
    tied = produce(model, calibration, store, recipe("rtn"))
    assert held_out_kl_nats(model, calibration, rotated) < held_out_kl_nats(model, calibration, tied)
    assert "lm_head.weight" in read_headers(rotated.directory / CHECKPOINT)
    more = rotated.artifact.coverage.checkpoint_bytes - tied.artifact.coverage.checkpoint_bytes
    assert more == 260 * 64 * 4
    assert any("0.1 MB more" in warning for warning in rotated.artifact.warnings)
    subjects = [decision.subject for decision in rotated.artifact.decisions]
    assert "rotation of the residual stream" in subjects and "rotation of values" in subjects


def test_quantize_trains_scales_where_asked_and_says_so(model: Path, calibration: CalibrationSource, store: Store) -> None:
    trained = produce(model, calibration, store, recipe("rtn"), distill_steps=20)
    plain = produce(model, calibration, store, recipe("rtn"))
    assert held_out_kl_nats(model, calibration, trained) < held_out_kl_nats(model, calibration, plain)
    decision = next(it for it in trained.artifact.decisions if it.subject == "scale-only self-distillation")
    assert decision.numbers["after_kl_nats"] < decision.numbers["before_kl_nats"] and decision.numbers["num_steps"] == 20
    assert {path.name for path in trained.directory.iterdir()} == {CHECKPOINT, "artifact.json"}


@torch.no_grad()
def kl_with_rounded_inputs_nats(model: Path, calibration: CalibrationSource, stored: Stored[QuantizedModel]) -> float:
    """Return the held-out KL when every planned layer's input is rounded too."""
    full, rounded = load_dequantized(model), load_dequantized(stored.directory / CHECKPOINT)
    for layer in stored.artifact.plan:
        rounded.get_submodule(layer.layer).register_forward_pre_hook(lambda _, arguments: (round_per_token(arguments[0]),))
    texts = [torch.tensor([tokens]) for tokens in prepare(calibration, model).held_out]
    return sum(kl_nats(full(tokens).logits, rounded(tokens).logits).mean().item() for tokens in texts) / len(texts)


def round_per_token(inputs_BTI: torch.Tensor) -> torch.Tensor:
    """Round to 8 bits with one step per token."""
    step_BT1 = inputs_BTI.abs().amax(-1, keepdim=True) / 127.5
    return (inputs_BTI / step_BT1).round().clamp(-128, 127) * step_BT1


def test_quantize_with_smoothquant_loses_less_to_rounded_activations(
    calibration: CalibrationSource, store: Store, tmp_path: Path
) -> None:
    model = write_outlying(FAMILIES["llama"](False), tmp_path / "m")
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if "layernorm" in name:  # activations with outliers, read by columns that undo them
            tensor[list(OUTLIERS)] *= 60
        elif any(leaf in name for leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            tensor[:, list(OUTLIERS)] /= 480
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    w8a8 = {"formats": ("w8a8-int8",)}
    smooth, plain = (
        produce(model, calibration, store, WeightRecipe.model_validate({"method": method} | w8a8))
        for method in ("smoothquant", "rtn")
    )
    kls = [kl_with_rounded_inputs_nats(model, calibration, stored) for stored in (smooth, plain)]
    assert kls[0] < 0.2 * kls[1]
    assert not any("smoothquant" in warning for warning in smooth.artifact.warnings)
    decision = next(it for it in smooth.artifact.decisions if it.subject == "smoothquant")
    assert decision.numbers["peak_over_mean_after"] < 0.5 * decision.numbers["peak_over_mean_before"]


def test_quantize_with_awq_is_byte_identical_on_a_rerun(
    model: Path, calibration: CalibrationSource, store: Store, tmp_path: Path
) -> None:
    first = produce(model, calibration, store, recipe("awq")).artifact
    again = produce(model, calibration, Store(tmp_path / "again"), recipe("awq")).artifact
    assert first.files == again.files
