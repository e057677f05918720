"""Models with experts: routers stay, experts share a format, and those that no token reached are rounded to nearest and named."""

import json
from pathlib import Path

import pytest
import torch
from architecture_fixtures import FAMILIES, SIZES, write_architecture
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from model_optimizer.artifacts.base import Stage, Stored, Tree
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.formats.compressed_tensors import read_quantized_layers
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.tiny import write_byte_tokenizer
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.data_free import DataFreeInputs, round_model
from model_optimizer.quantization.layers import input_groups, is_expert, read_layers, tie_groups, weight_reader
from model_optimizer.quantization.linear_models import load_linear
from model_optimizer.quantization.shared import QuantizeInputs
from model_optimizer.quantization.stage import CHECKPOINT, quantize
from model_optimizer.quantization.unreached import REASON
from model_optimizer.store import Store, stage_key

SMALL = {
    "kl_breaker_nats": 1e9, "sensitivity_sequences": 1, "sensitivity_tokens": 16, "moments_sequences": 12, "moments_tokens": 40,
}  # fmt: skip
FP16_RATIO = 2.0**-10
"""transformers keeps unpacked experts in the type of their scales, float16."""


def calibration(path: Path, *texts: str) -> CalibrationSource:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return CalibrationSource.of(CalibrationConfig(path=path, min_length=2), path.parent)


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSource:
    texts = [f"Flock {n} has {n * n} sheep on {n % 7} hills." for n in range(16)]
    return calibration(tmp_path_factory.mktemp("calibration") / "c.jsonl", *texts)


def run(
    model: Path, source: CalibrationSource, store: Path, recipe: dict[str, object], **settings: object
) -> Stored[QuantizedModel]:
    inputs = QuantizeInputs(
        fingerprint="t",
        model=Tree.of(model),
        recipe=WeightRecipe.model_validate(recipe),
        calibration=source,
        config=QuantizationConfig.model_validate(SMALL | settings),
    )
    held = Store(store)
    return held.produce(
        Stage.QUANTIZE, stage_key(inputs), QuantizedModel, lambda folder: quantize(inputs, folder, store=held, progress=Quiet())
    )


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(4, 68)[None], use_cache=False).logits[0]
    return found


ROUTERS = {"mixtral": "model.layers.{}.block_sparse_moe.gate", "qwen3-moe": "model.layers.{}.mlp.gate"}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("mixtral", []), ("qwen3-moe", [{"layers": ["self_attn"], "precision": "int8-channel"}])],
    ids=["mixtral-one-format", "qwen3-moe-two-formats"],
)
def test_rounded_experts_load_in_transformers_as_here_and_routers_stay(
    family: str, overrides: list[dict[str, object]], varied: CalibrationSource, tmp_path: Path
) -> None:
    model = write_architecture(FAMILIES[family](False), tmp_path / "model")
    recipe = {"method": "rtn", "formats": ("int4-g32",)}
    stored = run(model, varied, tmp_path / "store", recipe, layer_overrides=overrides)
    checkpoint = stored.directory / CHECKPOINT
    before, after = load_file(model / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    ignored = json.loads((checkpoint / "config.json").read_text())["quantization_config"]["ignore"]
    for block in (0, 1):
        router = ROUTERS[family].format(block)
        assert torch.equal(after[f"{router}.weight"], before[f"{router}.weight"]) and router in ignored
    layers = read_layers(model).linears
    read = weight_reader(model, layers)
    formats = {layer.layer: layer.format for layer in stored.artifact.plan}
    for layer, tensor, name in read_quantized_layers(checkpoint):
        assert name == formats.pop(layer)
        assert torch.equal(FORMATS.get(name).dequantize(tensor), FORMATS.get(name).round_trip(read(layer)))
    assert not formats and not any("reached" in text or "transformers" in text for text in stored.artifact.warnings)
    ours = logits(load_dequantized(checkpoint))
    theirs, loading = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(loading.values())
    assert 0 <= (logits(theirs) - ours).abs().max() < 8 * FP16_RATIO * ours.abs().max()


@pytest.mark.parametrize("propagation", ["none", "inputs"])
def test_experts_that_no_token_reached_are_rounded_to_nearest_and_named(propagation: str, tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=1, tie_word_embeddings=False)
    model = write_architecture(config, tmp_path / "model")
    source = calibration(tmp_path / "c.jsonl", *("a" * n for n in (24, 25)))  # one token over and over: one expert per layer
    recipe = {"method": "gptq", "formats": ("int4-g32",)}
    stored = run(model, source, tmp_path / "store", recipe, error_propagation=propagation)
    told = [warning for warning in stored.artifact.warnings if "never reached by the calibration text" in warning]
    assert len(told) == 2 and all(text.startswith(f"3 of model.layers.{n}.block") for n, text in enumerate(told))
    named = {(n, int(number)) for n, text in enumerate(told) for number in text.split(": ")[1].split(";")[0].split(", ")}
    assert len(named) == 6
    blind = {
        tuple(map(int, (it.layer.split(".")[2], it.layer.split(".")[5]))) for it in stored.artifact.plan if it.reason == REASON
    }
    assert blind == named and any(text.startswith("18 matrices of experts saw no token") for text in stored.artifact.warnings)
    weight_format, read = FORMATS.get("int4-g32"), weight_reader(model, read_layers(model).linears)
    for layer, tensor, name in read_quantized_layers(stored.directory / CHECKPOINT):
        assert name == "int4-g32" and torch.isfinite(tensor.scale_OG).all()
        if is_expert(layer):
            parts = layer.split(".")
            nearest = weight_format.quantize(read(layer))
            same = torch.equal(tensor.codes_OI, nearest.codes_OI) and torch.equal(tensor.scale_OG, nearest.scale_OG)
            assert same is ((int(parts[2]), int(parts[5])) in named)


def test_experts_kept_beside_quantized_layers_are_warned_of(varied: CalibrationSource, tmp_path: Path) -> None:
    model = write_architecture(FAMILIES["qwen3-moe"](False), tmp_path / "model")
    stored = run(model, varied, tmp_path / "store", {"method": "rtn", "formats": ("int4-g32",)}, skip_layers=["experts"])
    assert [text for text in stored.artifact.warnings if text.startswith("24 matrices of experts stay in full precision")]
    load_dequantized(stored.directory / CHECKPOINT)


def test_experts_share_one_format_and_an_input_only_within_one(tmp_path: Path) -> None:
    layers = read_layers(write_architecture(FAMILIES["mixtral"](True), tmp_path)).linears
    (experts,) = (group for group in tie_groups(layers) if is_expert(group[0].name))
    assert len(experts) == 2 * 4 * 3 and len(tie_groups(layers)) == 1 + 2 * 2
    pairs = [[layer.name for layer in group] for group in input_groups(experts)]
    assert len(pairs) == 2 * 4 * 2
    assert pairs[:2] == [[f"model.layers.0.block_sparse_moe.experts.0.{leaf}" for leaf in it] for it in (("w1", "w3"), ("w2",))]


def test_a_layer_as_wide_as_the_expert_count_is_no_router(tmp_path: Path) -> None:
    wide = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    sizes = SIZES | {"intermediate_size": 32, "num_hidden_layers": 2}
    model = write_architecture(Qwen3MoeConfig(**sizes, **wide, mlp_only_layers=[0]), tmp_path)
    write_byte_tokenizer(model)
    layers = read_layers(model)
    assert layers.routers == ("model.layers.1.mlp.gate",)
    assert layers.kept["model.layers.1.mlp.gate"] == "router over 32 experts"
    names = {layer.name: layer.out_features for layer in layers.linears}
    assert names["model.layers.0.mlp.gate_proj"] == names["model.layers.0.self_attn.k_proj"] == 32


def test_conv1d_layers_are_stored_as_linear_ones_and_come_back_turned(varied: CalibrationSource, tmp_path: Path) -> None:
    model = write_architecture(FAMILIES["gpt2"](True), tmp_path / "model")
    stored = run(model, varied, tmp_path / "store", {"method": "rtn", "formats": ("int4-g32",)})
    before, after = load_dequantized(model), load_dequantized(stored.directory / CHECKPOINT)
    for layer in stored.artifact.plan:
        original_IO = before.get_parameter(f"{layer.layer}.weight").detach()
        expected_OI = FORMATS.get("int4-g32").round_trip(original_IO.T.contiguous())
        assert torch.equal(after.get_parameter(f"{layer.layer}.weight"), expected_OI.T)
    assert any("Conv1D in transformers, which does not load them quantized" in text for text in stored.artifact.warnings)


def test_experts_rounded_without_data_compute_as_fake_quantization_does(tmp_path: Path) -> None:
    model = write_architecture(FAMILIES["mixtral"](True), tmp_path / "model")
    inputs = DataFreeInputs(fingerprint="t", model=Tree.of(model), format="int4-g32")
    round_model(inputs, tmp_path / "out", progress=Quiet())
    checkpoint = tmp_path / "out" / "checkpoint"
    reference = load_linear(model)
    with torch.no_grad():
        for layer in read_layers(model).linears:
            weight_OI = reference.get_parameter(f"{layer.name}.weight")
            weight_OI.copy_(FORMATS.get("int4-g32").round_trip(weight_OI))
    assert (logits(load_dequantized(checkpoint)) - logits(reference)).abs().max() < 1e-5
    ignored = json.loads((checkpoint / "config.json").read_text())["quantization_config"]["ignore"]
    assert {ROUTERS["mixtral"].format(block) for block in (0, 1)} <= set(ignored)
