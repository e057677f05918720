"""What a diagnosis says of a checkpoint whose faults are known."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model_optimizer.errors import ConfigError
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.diagnosis import LayerDiagnosis, diagnose
from model_optimizer.quantization.layers import read_layers

BAD = "model.layers.1.mlp.down_proj"
SEQUENCES = [tuple(torch.randint(5, 200, (24,), generator=torch.Generator().manual_seed(seed)).tolist()) for seed in range(40)]


@pytest.fixture(scope="module")
def quantized(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layer in 8 bits, one of them in 2."""
    target = tmp_path_factory.mktemp("diagnosis") / "model"
    weights = load_file(tiny_llama / "model.safetensors")
    plan = {layer.name: "int2-g64" if layer.name == BAD else "int8-channel" for layer in read_layers(tiny_llama).linears}
    write_checkpoint(
        tiny_llama, target, plan, lambda layer: FORMATS.get(plan[layer]).quantize(weights[f"{layer}.weight"].float())
    )
    return target


@pytest.fixture(scope="module")
def found(tiny_llama: Path, quantized: Path) -> tuple[LayerDiagnosis, ...]:
    return diagnose(tiny_llama, quantized, SEQUENCES, cosine_floor=0.98, num_measured=3, progress=Quiet())


def test_diagnose_puts_the_planted_fault_first(found: tuple[LayerDiagnosis, ...]) -> None:
    assert len(found) == 14
    assert (found[0].layer, found[0].format, found[0].suspect) == (BAD, "int2-g64", True)
    assert not any(layer.suspect for layer in found[1:])
    assert [layer.measured_kl_nats is not None for layer in found] == [True] * 3 + [False] * 11
    rest = [layer.predicted_kl_nats for layer in found[1:]]
    assert rest == sorted(rest, reverse=True) and found[0].predicted_kl_nats > 100 * rest[0]


def test_diagnose_measures_the_kl_of_one_layer_alone(tiny_llama: Path, found: tuple[LayerDiagnosis, ...]) -> None:
    original, changed = load_dequantized(tiny_llama), load_dequantized(tiny_llama)
    weight_OI = changed.get_parameter(f"{BAD}.weight").detach()
    weight_OI.copy_(FORMATS.get("int2-g64").round_trip(weight_OI))
    tokens_BT = torch.tensor(SEQUENCES)
    with torch.no_grad():
        log_p, log_q = (torch.log_softmax(it(tokens_BT).logits.double(), -1) for it in (original, changed))
    truth = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    assert found[0].measured_kl_nats == pytest.approx(truth, rel=1e-4)
    assert 0.6 < found[0].predicted_kl_nats / truth < 1.6


def test_diagnose_gives_signal_over_noise_of_the_stored_weights(tiny_llama: Path, found: tuple[LayerDiagnosis, ...]) -> None:
    weight_OI = load_dequantized(tiny_llama).get_parameter(f"{BAD}.weight").detach()
    error_OI = FORMATS.get("int2-g64").round_trip(weight_OI) - weight_OI
    expected = 10 * torch.log10(weight_OI.square().sum() / error_OI.square().sum()).item()
    assert found[0].snr_db == pytest.approx(expected, abs=1e-3)
    assert found[0].weight_absmax == weight_OI.abs().max().item()
    assert all(layer.snr_db > 35 for layer in found[1:])


def test_diagnose_refuses_an_unquantized_checkpoint(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="holds no quantized layer"):
        diagnose(tiny_llama, tiny_llama, SEQUENCES, cosine_floor=0.98, num_measured=0, progress=Quiet())
