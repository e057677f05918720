"""Models that the walk does not cover go through llm-compressor in its own interpreter, by files and a process."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from architecture_fixtures import write_architecture
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from model_optimizer.artifacts.base import Stage, Tree
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.errors import IntegrityError, UnsupportedError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.compressed_tensors import read_quantized_layers, write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization.adaptors import llmcompressor, llmcompressor_script
from model_optimizer.quantization.adaptors.llmcompressor import (
    VARIABLE,
    OutsideJob,
    build_request,
    calibration_tensors,
    configured_interpreter,
    library_versions,
)
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.layers import read_plain_layers, weight_reader
from model_optimizer.quantization.outside import OutsideCase, quantize_uncovered, take_over
from model_optimizer.quantization.shared import QuantizeInputs
from model_optimizer.quantization.stage import CHECKPOINT, quantize
from model_optimizer.store import Store, stage_key

NEOX = GPTNeoXConfig(
    vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
KEPT = "gpt_neox.layers.0.attention.dense"
SEQUENCES = ((5, 6, 7), (8, 9), (10,))


class Notes(Quiet):
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.num_items = 0

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for item in items:
            self.num_items += 1
            yield item

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_architecture(NEOX, tmp_path_factory.mktemp("neox"))


@pytest.fixture(scope="module")
def plan(model: Path) -> dict[str, str]:
    names = [layer.name for layer in read_plain_layers(model).linears]
    return dict.fromkeys(names, "int4-g32") | {KEPT: "float32", names[-1]: "int8-channel"}


def case(model: Path, folder: Path, **recipe: object) -> OutsideCase:
    path = folder / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills."}) for n in range(16)))
    chosen = WeightRecipe.model_validate({"method": "gptq", "formats": ("int4-g32",)} | recipe)
    source = CalibrationSource.of(CalibrationConfig(path=path), folder)
    return OutsideCase(model, chosen, source, QuantizationConfig(skip_layers=(KEPT,), moments_sequences=6, moments_tokens=24))


def test_build_request_says_what_is_rounded_how_and_what_is_not(plan: dict[str, str], tmp_path: Path) -> None:
    request = build_request(OutsideJob(Path("/m"), plan, "gptq", SEQUENCES, seed=3), tmp_path)
    groups = request["groups"]
    assert isinstance(groups, dict)
    assert {len(group["targets"]) for group in groups.values()} == {6, 1} and request["ignore"] == [KEPT]
    assert groups["group_0"]["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "float16",
    }  # fmt: skip
    assert groups["group_1"]["weights"]["strategy"] == "channel" and groups["group_1"]["weights"]["num_bits"] == 8
    assert (request["method"], request["seed"]) == ("gptq", 3) and str(request["tokens"]).startswith(str(tmp_path))
    assert build_request(OutsideJob(Path("/m"), plan, "rtn", SEQUENCES), tmp_path)["tokens"] is None
    json.dumps(request)


@pytest.mark.parametrize(
    ("method", "format_name", "message"),
    [
        ("awq", "int4-g32", "not asked for method 'awq'; allowed: gptq, rtn"),
        ("gptq", "int4-g32-asym", "not asked for int4-g32-asym here; allowed are symmetric integer weights"),
        ("gptq", "fp8-dynamic", "not asked for fp8-dynamic here"),
    ],
)
def test_build_request_refuses_what_is_not_asked_for(method: str, format_name: str, message: str, tmp_path: Path) -> None:
    assert format_name in FORMATS.names()
    with pytest.raises(UnsupportedError, match=message):
        build_request(OutsideJob(Path("/m"), {"l": format_name}, method, SEQUENCES), tmp_path)


def test_the_script_reads_the_tokens_that_were_written(tmp_path: Path) -> None:
    save_file(calibration_tensors(SEQUENCES), tmp_path / "t.safetensors")
    batches = list(llmcompressor_script._batches(tmp_path / "t.safetensors"))
    assert [tuple(batch["input_ids"][0].tolist()) for batch in batches] == list(SEQUENCES)
    assert all(torch.equal(batch["attention_mask"], torch.ones_like(batch["input_ids"])) for batch in batches)


def test_told_lines_become_progress_and_others_go_to_the_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    llmcompressor_script._tell("note saving")
    llmcompressor_script._tell_rounded("Quantizing 3 module(s): a, b, c\n")
    llmcompressor_script._tell_rounded("Compression lifecycle initialized\n")
    print("chatter")
    progress = Notes()
    with (tmp_path / "log").open("w") as log:
        told = llmcompressor._told(iter(capsys.readouterr().out.splitlines(keepends=True)), log)
        assert len(list(llmcompressor._rounded_layers(told, progress))) == 3
    assert progress.notes == ["llm-compressor: saving"] and (tmp_path / "log").read_text() == "chatter\n"


@pytest.mark.parametrize(
    ("stated", "seen"), [(None, "is not set"), ("/nowhere/python", "names '/nowhere/python', which is no file")]
)
def test_quantize_without_an_interpreter_says_what_to_install_before_any_work(
    stated: str | None, seen: str, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if stated:
        monkeypatch.setenv(VARIABLE, stated)
    wanted = case(model, tmp_path)
    inputs = QuantizeInputs(
        fingerprint="t", model=Tree.of(model), recipe=wanted.recipe, calibration=wanted.calibration, config=wanted.config
    )
    with pytest.raises(UnsupportedError, match=f"{VARIABLE} {seen}; install one .*pip install llmcompressor"):
        quantize(inputs, tmp_path / "work", store=Store(tmp_path / "store"), progress=Quiet())
    assert not (tmp_path / "work").exists()


def test_quantize_uncovered_refuses_a_choice_of_formats(model: Path, tmp_path: Path) -> None:
    wanted = case(model, tmp_path, formats=("int4-g32", "int8-channel"), bits_budget=5.0)
    with pytest.raises(UnsupportedError, match="one format for all layers, the recipe has int4-g32, int8-channel"):
        quantize_uncovered(wanted, tmp_path, progress=Quiet())


def test_library_versions_tells_the_log_of_an_interpreter_without_llm_compressor(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"ended with code 1: .*No package metadata was found for llmcompressor"):
        library_versions(Path(sys.executable), tmp_path)


def test_take_over_keeps_their_codes_and_refuses_another_plan(model: Path, plan: dict[str, str], tmp_path: Path) -> None:
    read = weight_reader(model, read_plain_layers(model).linears)

    def quantized(layer: str) -> QuantizedTensor:
        return FORMATS.get(plan[layer]).quantize(read(layer))

    write_checkpoint(model, tmp_path / "theirs", plan, quantized)
    take_over(OutsideJob(model, plan, "rtn", ()), tmp_path / "theirs", tmp_path / "ours")
    expected = {layer: quantized(layer) for layer, name in plan.items() if name != "float32"}
    for layer, tensor, _ in read_quantized_layers(tmp_path / "ours"):
        wanted = expected.pop(layer)
        assert torch.equal(tensor.codes_OI, wanted.codes_OI) and torch.equal(tensor.scale_OG, wanted.scale_OG)
    assert not expected
    other = plan | {KEPT: "int4-g32"}
    with pytest.raises(IntegrityError, match=rf"stored {KEPT} as it was, asked for was int4-g32 \(1 such layers\)"):
        take_over(OutsideJob(model, other, "rtn", ()), tmp_path / "theirs", tmp_path / "again")


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no environment with llm-compressor")
def test_quantize_hands_an_uncovered_model_to_llm_compressor(model: Path, tmp_path: Path) -> None:
    assert configured_interpreter().is_file()
    wanted, store, progress = case(model, tmp_path), Store(tmp_path / "store"), Notes()
    inputs = QuantizeInputs(
        fingerprint="t", model=Tree.of(model), recipe=wanted.recipe, calibration=wanted.calibration, config=wanted.config
    )
    stored = store.produce(
        Stage.QUANTIZE, stage_key(inputs), QuantizedModel, lambda folder: quantize(inputs, folder, store=store, progress=progress)
    )
    artifact = stored.artifact
    assert {it.layer: it.format for it in artifact.plan}.pop(KEPT) == "float32"
    assert artifact.coverage.quantized_weights_ratio == 1.0 and not artifact.coverage.missing_keys
    assert all((it.predicted_kl_nats > 0) is (0.9 < it.output_cosine < 1) is (it.layer != KEPT) for it in artifact.plan)
    assert "llmcompressor 0." in artifact.decisions[0].because and progress.num_items >= 7
    tokens = torch.arange(4, 68)[None]
    with torch.no_grad():
        full, ours = (load_dequantized(it)(tokens).logits for it in (model, stored.directory / CHECKPOINT))
        theirs = AutoModelForCausalLM.from_pretrained(stored.directory / CHECKPOINT)(tokens).logits
    assert (theirs - ours).abs().max() < 1e-5 * ours.abs().max()
    assert 0 < (ours - full).norm() < 0.3 * full.norm()
