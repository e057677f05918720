"""`diagnose` on a checkpoint that `quantize` wrote."""

import json
from pathlib import Path

import pytest
from entry import Command

from model_optimizer.models.tiny import write_tiny_llama

WORDS = ["wool", "lamb", "ewe", "fold", "hill", "dawn", "bell", "dog", "rain", "grass", "gate", "stone", "river", "cloud", "path"]


@pytest.fixture
def folder(tmp_path: Path, command: Command) -> Path:
    write_tiny_llama(tmp_path / "original")
    lines = [json.dumps({"text": " ".join(WORDS[index % 15 :] + WORDS[: index % 15] + [str(index)])}) for index in range(20)]
    (tmp_path / "calibration.jsonl").write_text("\n".join(lines))
    arguments = ["--model-path", "original", "--calibration-data", "calibration.jsonl", "--output-path", "small", "--bits", "4"]
    assert command("quantize", *arguments, cwd=tmp_path).code == 0
    return tmp_path


def test_diagnose_lists_every_quantized_layer_and_measures_the_worst(folder: Path, command: Command) -> None:
    arguments = ["original", "small", "--calibration-data", "calibration.jsonl"]
    told = json.loads(command("diagnose", *arguments, "--measure", "2", "--json", cwd=folder).out)
    assert told["num_layers"] == len(told["layers"]) == 14
    worst, other = told["layers"][0], told["layers"][2]
    assert other["measured_kl_nats"] is None and 0.3 < worst["predicted_kl_nats"] / worst["measured_kl_nats"] < 3
    table = command("diagnose", *arguments, cwd=folder).out.splitlines()
    assert len(table) == 1 + 14 + 1 and table[1].split()[0] == worst["layer"]


def test_diagnose_refuses_the_original_with_one_line(folder: Path, command: Command) -> None:
    ended = command("diagnose", "original", "original", "--calibration-data", "calibration.jsonl", cwd=folder)
    assert ended.code == 2 and "holds no quantized layer" in ended.err
