"""Every architecture is quantized end to end, or refused by name before anything is computed."""

import json
from pathlib import Path

import pytest
import torch
from architecture_fixtures import FAMILIES, NUM_LAYERS, write_architecture

from model_optimizer.artifacts.base import Stage, Stored, Tree
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.models.headers import read_headers
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.layers import read_layers
from model_optimizer.quantization.shared import QuantizeInputs
from model_optimizer.quantization.stage import CHECKPOINT, quantize
from model_optimizer.store import Store, stage_key


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSource:
    path = tmp_path_factory.mktemp("calibration") / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills."}) for n in range(16)))
    return CalibrationSource.of(CalibrationConfig(path=path), path.parent)


def quantized(model: Path, calibration: CalibrationSource, propagation: str, store: Store) -> Stored[QuantizedModel]:
    settings = QuantizationConfig.model_validate(
        {
            "kl_breaker_nats": 1e9,
            "sensitivity_sequences": 1,
            "sensitivity_tokens": 16,
            "moments_sequences": 12,
            "moments_tokens": 40,
            "error_propagation": propagation,
        }
    )
    recipe = WeightRecipe(method="gptq", formats=("int4-g32",))
    inputs = QuantizeInputs(fingerprint="t", model=Tree.of(model), recipe=recipe, calibration=calibration, config=settings)
    return store.produce(
        Stage.QUANTIZE, stage_key(inputs), QuantizedModel, lambda folder: quantize(inputs, folder, store=store, progress=Quiet())
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_quantize_covers_the_architecture(family: str, tied: bool, calibration: CalibrationSource, tmp_path: Path) -> None:
    model = write_architecture(FAMILIES[family](tied), tmp_path / "model")
    stored = quantized(model, calibration, "inputs" if tied else "none", Store(tmp_path / "store"))
    layers = {layer.name for layer in read_layers(model).linears}
    assert {layer.layer for layer in stored.artifact.plan if layer.format == "int4-g32"} == layers
    assert len(layers) == 2 * NUM_LAYERS.get(family, 7)
    assert stored.artifact.coverage.quantized_weights_ratio == 1.0 and not stored.artifact.coverage.missing_keys
    assert stored.artifact.coverage.true_bits_per_weight == 4 + 16 / 32
    assert ("lm_head.weight" in read_headers(stored.directory / CHECKPOINT)) is not tied
    tokens = torch.arange(4, 68)[None]
    original, changed = load_dequantized(model), load_dequantized(stored.directory / CHECKPOINT)
    head, embedding = changed.get_output_embeddings(), changed.get_input_embeddings()
    assert (head.weight.data_ptr() == embedding.weight.data_ptr()) is tied
    with torch.no_grad():
        full, rounded = original(tokens).logits[0], changed(tokens).logits[0]
    most = 0.8 if "mlp.experts" in " ".join(layers) or "moe.experts" in " ".join(layers) else 0.7  # tokens may change experts
    assert 0 < (rounded - full).norm() < most * full.norm()
