"""The compile stage: engines with proof of parity, one shared export, failures that can be repeated alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from model_optimizer.artifacts.base import Produced, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel, Layout
from model_optimizer.artifacts.quantized import Coverage, QuantizedModel
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.parity import LENGTHS, kl_divergence, parity_sequences
from model_optimizer.compilation.stage import CompileInputs, compile_model
from model_optimizer.compilation.worker import BuildSpec, run_isolated
from model_optimizer.errors import CompileError, UnsupportedError
from model_optimizer.formats.compressed_tensors import read_quantized_layers, write_checkpoint
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.paths import REPOSITORY_ROOT
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.quantization.registry import METHODS
from model_optimizer.store import Store, stage_key


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compile")
    records = [{"text": f"Sample {index}: " + " ".join(f"word{index * k % 97}" for k in range(30))} for index in range(12)]
    (root / "text.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return root


def inputs_for(root: Path, source: Path, strategy: Strategy, config: CompileConfig) -> CompileInputs:
    recipe = strategy.weights
    if recipe.quantized and not (root / recipe.label).exists():
        headers = read_headers(source)
        layers = [name.removesuffix(".weight") for name in headers if "_proj" in name]
        number = FORMATS.get(recipe.formats[0])
        write_checkpoint(
            source,
            root / recipe.label,
            dict.fromkeys(layers, recipe.formats[0]),
            lambda layer: METHODS.get(recipe.method).quantize(read_tensor(headers[f"{layer}.weight"]).float(), number),
        )
    artifact = QuantizedModel(
        recipe=recipe,
        checkpoint=recipe.label if recipe.quantized else None,
        plan=(),
        coverage=Coverage(quantized_weights_ratio=0, true_bits_per_weight=32, checkpoint_bytes=0),
        predicted_kl_nats=0,
        calibration=None,
    )
    produced = Produced(started_at="", wall_s=0, peak_rss_bytes=0)
    stored = Stored[QuantizedModel](
        kind="quantize", key=recipe.label, artifact=artifact, directory=root, produced=produced, cached=True
    )
    calibration = CalibrationSource.of(CalibrationConfig(path=root / "text.jsonl"), root)
    return CompileInputs(
        fingerprint="test", model=Tree.of(source), quantized=stored, strategy=strategy, config=config, calibration=calibration
    )


def produce(root: Path, inputs: CompileInputs) -> Stored[CompiledModel]:
    store = Store(root / "store")
    return store.produce(
        "compile",
        stage_key(inputs),
        CompiledModel,
        lambda workspace: compile_model(inputs, workspace, store=store, progress=Quiet()),
    )


def test_compile_model_swaps_int8_weights_and_can_be_repeated_alone(root: Path, tiny_llama: Path, tmp_path: Path) -> None:
    strategy = Strategy(weights=WeightRecipe(method="rtn", formats=("int8-channel",)), runtime="onnxruntime")
    stored = produce(root, inputs_for(root, tiny_llama, strategy, CompileConfig(parity_kl_nats=0.5)))
    compiled = stored.artifact
    layout = Layout.model_validate_json((stored.directory / compiled.layout).read_bytes())
    assert len(layout.fused) == layout.num_executed_ops["MatMulNBits"] == 14
    assert {op.bits for op in layout.fused} == {8}
    assert compiled.parity.passed
    assert compiled.parity.mean_kl_nats <= 0.5
    assert compiled.engine.num_bytes == sum(path.stat().st_size for path in (stored.directory / "engine").iterdir())
    assert len(list((root / "store" / "export").glob("*/artifact.json"))) == 1
    assert compiled.reproduce is not None
    script = stored.directory / compiled.reproduce
    subprocess.run(
        [sys.executable, str(script), str(tmp_path)], check=True, env={"PYTHONPATH": str(REPOSITORY_ROOT)}, timeout=120
    )
    again, first = tmp_path / "engine" / "model.onnx.data", stored.directory / "engine" / "model.onnx.data"
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize(("name", "bits"), [("int8-channel", 8), ("int4-g32-asym", 4), ("int2-g32", 2)])
def test_compile_model_gives_openvino_the_codes_of_the_checkpoint(root: Path, tiny_llama: Path, name: str, bits: int) -> None:
    strategy = Strategy(weights=WeightRecipe(method="rtn", formats=(name,)), runtime="openvino")
    stored = produce(root, inputs_for(root, tiny_llama, strategy, CompileConfig(parity_kl_nats=1e-7)))
    compiled = stored.artifact
    layout = Layout.model_validate_json((stored.directory / compiled.layout).read_bytes())
    assert {op.bits for op in layout.fused} == {bits} and len(layout.fused) == 14
    assert layout.inputs[3] == "logits_from" and layout.num_executed_ops["FullyConnected"] >= 14
    assert compiled.parity.mean_kl_nats < 1e-7 and compiled.parity.greedy_tokens_equal  # activations are not rounded here
    assert {path.name for path in (stored.directory / "engine").iterdir()} == {"openvino_model.xml", "openvino_model.bin"}
    assert len(list((root / "store" / "export").glob("*/artifact.json"))) == 1  # shared with every other engine


@pytest.mark.parametrize(("runtime", "name"), [("onnxruntime", "int4-g32"), ("openvino", "int3-g32"), ("torch", "int2-g32")])
def test_compile_model_computes_with_negative_scales(root: Path, tiny_llama: Path, runtime: str, name: str) -> None:
    strategy = Strategy(weights=WeightRecipe(method="rtn-mse", formats=(name,)), runtime=runtime)
    compiled = produce(root, inputs_for(root, tiny_llama, strategy, CompileConfig(parity_kl_nats=1e-7))).artifact
    scales = [tensor.scale_OG for _, tensor, _ in read_quantized_layers(root / strategy.weights.label)]
    assert any((scale < 0).any() for scale in scales) and any((scale > 0).any() for scale in scales)
    assert compiled.parity.mean_kl_nats < 1e-7 and compiled.parity.greedy_tokens_equal


def test_compile_model_refuses_weights_that_openvino_does_not_compute(root: Path, tiny_llama: Path) -> None:
    strategy = Strategy(weights=WeightRecipe(method="rtn", formats=("fp8-dynamic",)), runtime="openvino")
    with pytest.raises(UnsupportedError, match=r"openvino computes float32, int8, .* not fp8-dynamic"):
        produce(root, inputs_for(root, tiny_llama, strategy, CompileConfig()))


def test_compile_model_falls_back_to_float32_activations_when_parity_fails(root: Path, tiny_llama: Path) -> None:
    strategy = Strategy(weights=WeightRecipe(method="rtn", formats=("int4-g64",)), runtime="onnxruntime")
    compiled = produce(root, inputs_for(root, tiny_llama, strategy, CompileConfig(parity_kl_nats=1e-7))).artifact
    (warning,) = compiled.warnings
    assert "int8 activations: mean KL" in warning
    assert compiled.decisions[0].choice == "float32 activations"
    assert compiled.parity.mean_kl_nats < 1e-7
    assert compiled.parity.greedy_tokens_equal


def test_compile_model_lets_torch_round_inputs_as_the_checkpoint_says(root: Path, tiny_llama: Path) -> None:
    strategy = Strategy(weights=WeightRecipe(method="rtn", formats=("w8a8-int8",)), runtime="torch")
    compiled = produce(root, inputs_for(root, tiny_llama, strategy, CompileConfig())).artifact
    # sums of another order differ in the last bit, and where that crosses a half, a rounded input moves by a whole step
    assert compiled.parity.mean_kl_nats < 1e-5 and compiled.parity.greedy_tokens_equal


def test_compile_model_links_the_checkpoint_for_torch(root: Path, tiny_llama: Path) -> None:
    stored = produce(root, inputs_for(root, tiny_llama, Strategy(weights=WeightRecipe(), runtime="torch"), CompileConfig()))
    compiled = stored.artifact
    assert compiled.reproduce is None
    assert compiled.parity.mean_kl_nats < 1e-9
    assert compiled.parity.top1_agreement_ratio == 1.0
    assert compiled.engine.num_bytes == (tiny_llama / "model.safetensors").stat().st_size
    assert (stored.directory / "engine" / "model.safetensors").samefile(tiny_llama / "model.safetensors")


def test_compile_model_raises_with_the_numbers_when_nothing_passes(root: Path, tiny_llama: Path) -> None:
    config = CompileConfig(parity_kl_nats=1e-30)
    inputs = inputs_for(root, tiny_llama, Strategy(weights=WeightRecipe(), runtime="onnxruntime"), config)
    with pytest.raises(CompileError, match=r"float32: mean KL .* nats over \d+ tokens \(allowed 1e-30\)") as caught:
        produce(root, inputs)
    assert caught.value.reproduce.is_file()


def test_compile_model_refuses_tensorrt_with_the_reason(root: Path, tiny_llama: Path) -> None:
    inputs = inputs_for(root, tiny_llama, Strategy(weights=WeightRecipe(), runtime="tensorrt"), CompileConfig())
    with pytest.raises(UnsupportedError, match="no TensorRT runtime is implemented"):
        produce(root, inputs)


def test_run_isolated_names_the_reproduce_script_when_the_build_fails(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    spec = BuildSpec(step="onnxruntime", source=tmp_path / "empty", output=tmp_path)
    with pytest.raises(CompileError, match="ended with code 1") as caught:
        run_isolated(spec, tmp_path, 120)
    assert caught.value.reproduce == tmp_path / "reproduce.py"
    assert str(tmp_path / "empty") in caught.value.reproduce.read_text()


def test_run_isolated_stops_a_build_that_takes_too_long(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"took longer than 0.01 s"):
        run_isolated(BuildSpec(step="export", source=tmp_path, output=tmp_path), tmp_path, 0.01)


def test_kl_divergence_matches_a_hand_computed_value() -> None:
    expected, seen = np.log(np.array([[0.5, 0.5]], np.float32)), np.log(np.array([[0.9, 0.1]], np.float32))
    assert kl_divergence(expected, seen)[0] == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1), rel=1e-6)


def test_parity_sequences_covers_every_length_from_one_text_or_many() -> None:
    one = parity_sequences([tuple(range(400))])
    assert [len(sequence) for sequence in one] == list(LENGTHS)
    assert sum(one, ()) == tuple(range(sum(LENGTHS)))
    many = parity_sequences([tuple(range(200))] * 4)
    assert [len(sequence) for sequence in many] == list(LENGTHS)
