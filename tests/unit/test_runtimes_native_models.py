"""The native forward pass against transformers: every covered architecture, every kind of checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
from architecture_fixtures import FAMILIES, write_architecture
from native_fixtures import COVERED, greedy, kv_plan, quantize_by_rounding, write_covered
from native_fixtures import generate as generated
from safetensors.torch import load_file, save_file

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.errors import IntegrityError, UnsupportedError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.protocols import GenerationRequest, TokenBatch
from model_optimizer.runtimes.registry import RUNTIMES, framework_version
from model_optimizer.runtimes.torch.config import NativeOptions
from model_optimizer.runtimes.torch.engine import open_native

PROMPTS = ((5, 6, 7), (100,), tuple(range(10, 51)), (9, 8, 7, 6), tuple(range(200, 217)))
NUM_NEW = 14
FORMATS_SEEN = (("int8-channel",), ("int4-g32",), ("fp8-dynamic",), ("int4-g32", "int8-channel", "float32", "int3-g32"))


@pytest.fixture(scope="module", params=COVERED)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_covered(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_covered("llama", tmp_path_factory.mktemp("plain") / "model")


def test_generation_equals_transformers_single_and_batched(checkpoint: Path) -> None:
    reference = load_dequantized(checkpoint)
    expected = [greedy(reference, prompt, NUM_NEW) for prompt in PROMPTS]
    requests = [GenerationRequest(prompt, NUM_NEW, shares_prefix=True) for prompt in PROMPTS]
    runtime = open_native(checkpoint, kv_plan(), NativeOptions(debug=True, max_prefill_tokens=24))
    assert [generated(runtime, [request])[0] for request in requests] == expected
    assert generated(runtime, requests) == expected
    assert runtime.activity().pool.hit_tokens > 0


def test_logits_and_scores_equal_transformers(checkpoint: Path) -> None:
    reference = load_dequantized(checkpoint)
    runtime = open_native(checkpoint, kv_plan())
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPTS[2]])).logits[0]
    np.testing.assert_allclose(runtime.logits(PROMPTS[2]), expected.numpy(), atol=2e-4)
    scores = runtime.score(TokenBatch((PROMPTS[2], PROMPTS[0]), (7, 1)))[0]
    log_probs = expected.log_softmax(-1).numpy()
    np.testing.assert_allclose(scores.log_probs, [log_probs[t - 1, PROMPTS[2][t]] for t in range(7, 41)], atol=2e-4)
    assert scores.is_greedy.tolist() == [bool(log_probs[t - 1].argmax() == PROMPTS[2][t]) for t in range(7, 41)]


@pytest.mark.parametrize("formats", FORMATS_SEEN, ids="-".join)
@pytest.mark.parametrize("keep_packed", [False, True])
def test_logits_of_quantized_checkpoints_equal_the_loaded_model(
    llama: Path, tmp_path: Path, formats: tuple[str, ...], keep_packed: bool
) -> None:
    quantized = quantize_by_rounding(llama, tmp_path / "quantized", formats)
    with torch.inference_mode():
        expected = load_dequantized(quantized)(torch.tensor([PROMPTS[2]])).logits[0].numpy()
    runtime = open_native(quantized, kv_plan(), NativeOptions(keep_packed=keep_packed))
    np.testing.assert_allclose(runtime.logits(PROMPTS[2]), expected, atol=5e-4)
    assert any(("stay packed" if keep_packed else "unpacked to float32") in note for note in runtime.facts.notes)


def test_keep_packed_holds_the_bytes_of_the_file(llama: Path, tmp_path: Path) -> None:
    quantized = quantize_by_rounding(llama, tmp_path / "quantized", ("int4-g32",))
    packed = open_native(quantized, kv_plan(), NativeOptions(keep_packed=True)).memory().weight_bytes
    unpacked = open_native(quantized, kv_plan()).memory().weight_bytes
    num_linear = sum(tensor.numel() for name, tensor in load_file(llama / "model.safetensors").items() if "_proj" in name)
    assert unpacked - packed == pytest.approx(num_linear * (4 - 0.5 - 2 / 32), abs=14 * 16)  # shapes are 14 pairs of int64


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "mixtral"])
def test_open_native_names_what_it_does_not_cover(tmp_path: Path, architecture: str) -> None:
    directory = write_architecture(FAMILIES[architecture](True), tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"does not cover model type '.*'; covered: llama, mistral, qwen2, qwen3"):
        open_native(directory, kv_plan())


def test_registry_falls_back_to_transformers_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_architecture(FAMILIES["gemma3"](True), tmp_path / "model")
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version=framework_version("torch"))
    runtime = RUNTIMES.get("torch").open(engine, directory, kv_plan())
    assert "does not cover model type 'gemma3_text'" in runtime.facts.notes[0]
    assert "does not cover" in caplog.text
    assert generated(runtime, [GenerationRequest(PROMPTS[0], 4)]) == [greedy(load_dequantized(directory), PROMPTS[0], 4)]
    with pytest.raises(
        UnsupportedError, match=r"keeps keys and values in int8, and .* 'gemma3_text'.*; set memory.kv_precision: auto"
    ):
        RUNTIMES.get("torch").open(engine, directory, kv_plan().model_copy(update={"precision": "int8"}))


def test_open_native_refuses_rotary_scalings_that_follow_the_length(tmp_path: Path) -> None:
    from architecture_fixtures import SIZES
    from transformers import LlamaConfig

    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    directory = write_architecture(LlamaConfig(**SIZES, rope_parameters=parameters), tmp_path / "model")
    with pytest.raises(UnsupportedError, match="does not cover rope type 'dynamic'"):
        open_native(directory, kv_plan())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            r"the tensor model.layers.1.mlp.up_proj.weight is missing",
        ),
        (lambda tensors: tensors.update(stranger=torch.zeros(2)), r"explains 1 tensors not, e.g. stranger"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(32)}),
            r"norm.weight has shape \[32\], .* asks for \[64\]",
        ),
    ],
)
def test_open_native_refuses_weights_that_do_not_fit(llama: Path, tmp_path: Path, change: object, message: str) -> None:
    tensors = load_file(llama / "model.safetensors")
    assert callable(change)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(IntegrityError, match=message):
        open_native(tmp_path, kv_plan())
