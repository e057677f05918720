"""`quantize` in its forms: without data, as GGUF, flat, with an engine, and only foretold."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from entry import Command
from gguf import GGUFReader
from gguf_fixtures import MODELS, write_model
from tiny import WORDS

from model_optimizer.formats.loading import load_dequantized, read_state
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize")
    write_model(MODELS["llama"], folder / "model")
    lines = [json.dumps({"text": " ".join(np.roll(WORDS, at)) + f" {at}"}) for at in range(12)]
    (folder / "calibration.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "project")


def test_flat_form_rounds_without_data_and_tells_how(folder: Path, command: Command) -> None:
    flat = ("--model", "model", "--quantize", "int8")
    first, again = (command(*flat, "--output", name, "--json", cwd=folder) for name in ("out", "again"))
    assert first.code == 0, first.err
    assert json.loads(first.out)["quantized_weights_ratio"] == 1.0
    out, source = folder / "out", read_headers(folder / "model")
    name = "model.layers.1.self_attn.v_proj.weight"
    expected = FORMATS.get("int8-channel").round_trip(read_tensor(source[name]))
    assert torch.equal(read_state(out)[name], expected) and "lm_head.weight" not in read_headers(out)
    assert torch.isfinite(load_dequantized(out)(torch.tensor([[5, 6, 7]])).logits).all()
    told = json.loads((out / "metadata.json").read_bytes())
    assert told["strategy"]["formats"] == ["int8-channel"] and told["calibration_sha256"] is None
    assert len(told["optimizer_hash"]) == len(told["model_sha256"]) == 64 and told["frameworks"]["torch"] == torch.__version__
    names = sorted(path.name for path in out.iterdir())
    assert {"config.json", "model.safetensors", "metadata.json", "tokenizer.json"} <= set(names)
    assert names == sorted(path.name for path in (folder / "again").iterdir()) and again.code == 0
    assert all((out / it).read_bytes() == (folder / "again" / it).read_bytes() for it in names)


def test_gguf_is_weighed_by_calibration_data_when_given(folder: Path, command: Command) -> None:
    arguments = ("quantize", "--model_path", "model", "--format", "gguf:q4_k_m", "--json", "--output_path")
    plain = command(*arguments, "plain", cwd=folder)
    weighed = command(*arguments, "weighed", "--calibration-data", "calibration.jsonl", cwd=folder)
    assert (plain.code, weighed.code) == (0, 0), plain.err + weighed.err
    assert json.loads(plain.out)["importance_tokens"] == 0 < json.loads(weighed.out)["importance_tokens"]
    left, right = (GGUFReader(folder / name / "model-q4_k_m.gguf").tensors for name in ("plain", "weighed"))
    same = {one.name: np.array_equal(one.data, other.data) for one, other in zip(left, right, strict=True)}
    assert not same["blk.0.attn_q.weight"] and not same["blk.2.ffn_down.weight"] and same["token_embd.weight"]
    assert json.loads((folder / "plain" / "metadata.json").read_bytes())["strategy"] == {"gguf": "q4_k_m"}
    for name in ("config.json", "tokenizer.json"):  # so that `serve` with `engine: llamacpp` takes the directory
        assert (folder / "plain" / name).read_bytes() == (folder / "model" / name).read_bytes()
    assert not list((folder / "plain").glob("*.safetensors"))


def test_dry_run_foretells_the_bytes_and_writes_nothing(folder: Path, command: Command) -> None:
    base = ("quantize", "--model_path", "model", "--output_path", "out")
    for more in (
        (),
        ("--format", "gguf:q6_k"),
        ("--quant_method", "gptq", "--bits", "4", "--calibration_data", "calibration.jsonl"),
    ):
        told = command(*base, *more, "--dry-run", "--json", cwd=folder)
        assert told.code == 0, told.err
        figures = json.loads(told.out)
        assert figures["predicted_s"] > 0 and figures["predicted_peak_bytes"] > 0
        assert not (folder / "out").exists()
        if not more:
            weights = 3 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
            rows = 3 * (2 * 256 + 2 * 128 + 2 * 512 + 256)
            assert figures["predicted_output_bytes"] == weights + 2 * rows


@pytest.mark.full
def test_engine_lies_beside_the_checkpoint_when_asked_for(folder: Path, command: Command) -> None:
    engine = ("--compile-level", "1", "--target-framework", "onnxruntime", "--calibration-data", "calibration.jsonl")
    done = command("--model", "model", "--quantize", "int8", *engine, "--output", "out", "--json", cwd=folder)
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    assert figures["parity_kl_nats"] < 0.01 and figures["predicted_kl_nats"] > 0
    assert json.loads((folder / "out" / "layout.json").read_bytes())["level"] == 1
    engine_bytes = sum(path.stat().st_size for path in (folder / "out" / "engines" / "onnxruntime").rglob("*") if path.is_file())
    assert engine_bytes >= figures["engine_bytes"] > 0
