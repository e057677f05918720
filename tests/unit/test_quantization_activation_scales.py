"""Frozen input steps come from a replay in full precision; formats that round inputs through the stage, and who refuses them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_optimizer.artifacts.activation_scales import ActivationRanges, InputRange
from model_optimizer.artifacts.base import Stage, Stored, Tree
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.compressed_tensors import read_plan, read_quantized_layers
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.activation_scales import (
    Magnitudes,
    RangesInputs,
    input_step,
    measure_ranges,
    refuse_experts,
    request_peaks,
)
from model_optimizer.quantization.asked_formats import measured_formats
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.layers import fitting_formats, read_layers
from model_optimizer.quantization.scale_store import DiskScaleStore
from model_optimizer.quantization.shared import QuantizeInputs
from model_optimizer.quantization.stage import CHECKPOINT, quantize
from model_optimizer.quantization.warm_up import ScaleCollector, warm_ranges
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.store import Store, stage_key

TOKENS = torch.arange(4, 44)[None]
LOOSE = {
    "kl_breaker_nats": 1e9,
    "sensitivity_sequences": 4,
    "sensitivity_tokens": 64,
    "moments_sequences": 6,
    "moments_tokens": 48,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSource:
    path = tmp_path_factory.mktemp("calibration") / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills."}) for n in range(12)))
    return CalibrationSource.of(CalibrationConfig(path=path), path.parent)


def produce(store: Store, model: Path, calibration: CalibrationSource, name: str, **config: object) -> Stored[QuantizedModel]:
    inputs = QuantizeInputs(
        fingerprint="test",
        model=Tree.of(model),
        recipe=WeightRecipe(method="rtn", formats=(name,)),
        calibration=calibration,
        config=QuantizationConfig.model_validate(LOOSE | config),
    )
    make = lambda workspace: quantize(inputs, workspace, store=store, progress=Quiet())  # noqa: E731
    return store.produce(Stage.QUANTIZE, stage_key(inputs), QuantizedModel, make)


def replay(model: Path, calibration: CalibrationSource, workspace: Path, percentile: float = 100) -> ActivationRanges:
    inputs = RangesInputs(
        fingerprint="test", model=Tree.of(model), calibration=calibration, num_sequences=6, max_tokens=48, percentile=percentile
    )
    return measure_ranges(inputs, workspace, progress=Quiet())


def test_measure_ranges_finds_the_largest_input_of_a_plain_forward(
    tiny_llama: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    found = replay(tiny_llama, calibration, tmp_path)
    layers, model = [layer.name for layer in read_layers(tiny_llama).linears], load_dequantized(tiny_llama)
    samples = [tokens[:48] for tokens in prepare(calibration, tiny_llama).samples[:6]]
    peaks = [request_peaks(model, layers, tokens) for tokens in samples]
    assert found.ranges.keys() == set(layers) and found.num_tokens == sum(map(len, samples))
    for layer in layers:
        assert found.ranges[layer].largest == pytest.approx(max(it[layer] for it in peaks), rel=1e-5)
        assert found.ranges[layer].kept == found.ranges[layer].largest
    assert list(tmp_path.iterdir()) == []


def test_percentile_reaches_the_share_of_magnitudes_within_a_bin() -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    magnitudes = Magnitudes()
    for piece in values.split(3_000):
        magnitudes.add(piece)
    for percent in (50, 90, 99.9):
        exact = torch.quantile(values.abs(), percent / 100).item()
        assert exact <= magnitudes.percentile(percent) <= exact * 1.01
    assert magnitudes.percentile(100) == values.abs().max().item()
    assert Magnitudes().percentile(99) == 0.0


def test_input_step_divides_by_the_grid_and_names_a_layer_without_a_range() -> None:
    found = ActivationRanges(
        ranges={"a": InputRange(largest=4.48, kept=4.48), "dead": InputRange(largest=0, kept=0)}, percentile=100, num_tokens=1
    )
    assert input_step(found, "a", "fp8-static").tolist() == [pytest.approx(0.01)]
    assert input_step(found, "a", "w8a8-int8-static").tolist() == [pytest.approx(4.48 / 127.5)]
    with pytest.raises(UnsupportedError, match="dead saw nothing but zeros"):
        input_step(found, "dead", "fp8-static")
    with pytest.raises(UnsupportedError, match="outside the stack"):
        input_step(found, "lm_head", "fp8-static")


def test_refuse_experts_names_the_layer() -> None:
    refuse_experts({"model.layers.0.mlp.experts.3.up_proj": "int4-g64", "model.layers.0.self_attn.q_proj": "fp8-dynamic"})
    with pytest.raises(UnsupportedError, match=r"w8a8-int8 rounds the inputs of model\.layers\.0\.mlp\.experts\.3\.up_proj"):
        refuse_experts({"model.layers.0.mlp.experts.3.up_proj": "w8a8-int8"})


@pytest.mark.parametrize("name", ["fp8-static", "w8a8-int8", "int4-g32-asym"])
def test_quantize_writes_a_checkpoint_that_transformers_runs_alike(
    name: str, store: Store, tiny_llama: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    stored = produce(store, tiny_llama, calibration, name)
    checkpoint = stored.directory / CHECKPOINT
    assert set(read_plan(checkpoint).values()) == {name} and stored.artifact.coverage.quantized_weights_ratio == 1
    stock, loading = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(loading.values())
    with torch.no_grad():
        difference = stock(TOKENS).logits - load_dequantized(checkpoint)(TOKENS).logits
    assert difference.abs().max().item() < 1e-5
    predicted = next(it for it in stored.artifact.measures if it.name == "predicted_kl")
    assert ("rounding of inputs is not in it" in (predicted.reason or "")) == (FORMATS.get(name).activation is not None)
    if name == "fp8-static":
        ranges = replay(tiny_llama, calibration, tmp_path)
        for layer, tensor, _ in read_quantized_layers(checkpoint):
            assert tensor.input_scale is not None
            assert tensor.input_scale.item() == pytest.approx(ranges.ranges[layer].largest / 448, rel=1e-5)
        assert any(decision.subject == "frozen input steps" for decision in stored.artifact.decisions)


def test_w8a8_shares_the_figures_of_int8_and_the_pass_of_all_usual_recipes(
    store: Store, tiny_llama: Path, calibration: CalibrationSource
) -> None:
    rounded, plain = (produce(store, tiny_llama, calibration, name).artifact for name in ("w8a8-int8", "int8-channel"))
    assert [it.predicted_kl_nats for it in rounded.plan] == [it.predicted_kl_nats for it in plain.plan]
    linears = read_layers(tiny_llama).linears
    usual = fitting_formats(linears)
    assert len(usual) == 9 and not any("asym" in name or name.startswith(("fp8", "w8a8")) for name in usual)
    assert measured_formats(linears, ("w8a8-int8", "w8a8-int8-static", "int4-g64")) == usual
    assert measured_formats(linears, ("fp8-static", "int4-g64-asym")) == (*usual, "fp8-dynamic", "int4-g64-asym")


def test_a_layer_override_may_ask_for_another_layout(store: Store, tiny_llama: Path, calibration: CalibrationSource) -> None:
    override = {"layers": ("down_proj",), "precision": "fp8-dynamic"}
    stored = produce(store, tiny_llama, calibration, "int4-g64", layer_overrides=(override,))
    formats = {layer.layer: layer.format for layer in stored.artifact.plan}
    assert {name for layer, name in formats.items() if "down_proj" in layer} == {"fp8-dynamic"}
    section = json.loads((stored.directory / CHECKPOINT / "config.json").read_text())["quantization_config"]
    assert section["format"] == "mixed-precision" and read_plan(stored.directory / CHECKPOINT) == formats


@pytest.mark.parametrize("name", ["fp8-dynamic", "fp8-static", "w8a8-int8", "w8a8-int8-static"])
def test_runtimes_refuse_what_they_would_compute_otherwise(name: str) -> None:
    strategy = Strategy(weights=WeightRecipe(method="rtn", formats=(name,)), runtime="onnxruntime")
    answer = RUNTIMES.get("onnxruntime").supports(strategy)
    assert not answer.supported and name in answer.reason
    assert RUNTIMES.get("torch").supports(strategy.model_copy(update={"runtime": "torch"})).supported


def test_warm_up_on_a_live_model_stays_within_bounds_of_the_replay_and_feeds_the_next_process(
    tiny_llama: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    offline = {layer: it.kept for layer, it in replay(tiny_llama, calibration, tmp_path / "replay").ranges.items()}
    model, generator = load_dequantized(tiny_llama), torch.Generator().manual_seed(3)
    prompts = torch.randint(4, 200, (6, 24), generator=generator).tolist()
    requests = ((f"r{number}", request_peaks(model, list(offline), tokens)) for number, tokens in enumerate(prompts))
    store = DiskScaleStore(tmp_path / "cache")
    found = warm_ranges(store, "key", ScaleCollector(offline, num_requests=6), requests)
    assert found.origin == "measured" and found.num_accepted == 6
    assert all(0.5 * offline[layer] <= value <= 2 * offline[layer] for layer, value in found.ranges.items())
    assert found.ranges != offline
    assert warm_ranges(store, "key", ScaleCollector(offline), iter(())).ranges == found.ranges
