"""`calibration check`: what it counts, with and without a model, and when it ends with 2."""

import json
from pathlib import Path

import pytest
import torch
from entry import Command
from rich.console import Console
from tiny import write_project
from transformers import MixtralConfig, MixtralForCausalLM

from flows.compose import Composer
from flows.prepare import read_request
from flows.progress import TerminalProgress
from model_optimizer.models.resolve import resolve_model
from model_optimizer.models.tiny import write_byte_tokenizer
from model_optimizer.store import Store

STORIES = [
    f"Story {index}: the {word} was left on the bench by the river." for index, word in enumerate(["coat", "key", "map", "hat"])
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten records with a byte-order mark: four usable, three empty, one short, one copy, one bad."""
    records = [*({"text": story} for story in STORIES), {"text": ""}, {"text": ""}, {"text": " "}, {"text": "abc"}]
    lines = [json.dumps(record) for record in [*records, {"text": STORIES[0].upper()}, {"no": 1}]]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    return path


def test_check_counts_every_record_without_a_model(data: Path, command: Command) -> None:
    ended = command("calibration", "check", "data.jsonl", "--json", cwd=data.parent)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    report = told["report"]
    assert (report["num_read"], report["num_empty"], report["num_short"]) == (10, 3, 1)
    assert (report["num_duplicate"], report["num_bad"], report["num_used"], report["num_held_out"]) == (1, 1, 3, 1)
    assert told["unit"] == "bytes" and told["byte_order_mark"] and told["coverage"] is None
    used = [len(story) for story in STORIES]
    assert sum(used) - max(used) <= report["num_tokens"] <= sum(used) - min(used)
    assert told["golden_sets"] == ["quickstart-en", "quickstart-zh"] and told["golden_overlap"] == ""
    assert sorted(path.name for path in data.parent.iterdir()) == ["data.jsonl"]


def test_check_prints_bars_and_says_that_bytes_are_counted(data: Path, command: Command) -> None:
    out = command("calibration", "check", "data.jsonl", cwd=data.parent).out
    assert "lengths are bytes" in out and "byte-order mark dropped" in out
    assert "33-64 " + "#" * 40 + " 3" in out
    assert (
        "warning  calibration uses 3 samples, 256 were asked for: read 10, empty 3, short 1, duplicate 1, bad 1, held out 1"
        in out
    )


def test_check_compares_with_the_profiles_traffic_and_golden_sets(tmp_path: Path, tiny_llama: Path, command: Command) -> None:
    write_project(tmp_path, tiny_llama)
    arguments = ("calibration", "check", "calibration.jsonl", "--profile", "tiny.yaml")
    told = json.loads(command(*arguments, "--json", cwd=tmp_path).out)
    assert told["unit"] == "tokens" and told["golden_sets"] == ["words"]
    shares = [(octave["traffic_ratio"], octave["calibration_ratio"]) for octave in told["coverage"]["octaves"]]
    assert told["coverage"]["score_ratio"] == pytest.approx(sum(map(min, shares)))
    assert sum(traffic for traffic, _ in shares) == pytest.approx(1) == sum(given for _, given in shares)
    item = json.loads((tmp_path / "words" / "items.jsonl").read_text().splitlines()[3])
    with (tmp_path / "calibration.jsonl").open("a") as stream:
        stream.write(json.dumps({"text": item["prompt"] + item["choices"][item["answer"]]}) + "\n")
    ended = command(*arguments, cwd=tmp_path)
    assert ended.code == 2 and f"contains item {item['id']!r} of golden set 'words'" in ended.err
    assert "golden   calibration text 41" in ended.out


def test_check_compares_with_a_trace(data: Path, tiny_llama: Path, command: Command) -> None:
    trace = [{"prompt_tokens": 40, "output_tokens": 10}] * 3 + [{"prompt_tokens": 900, "output_tokens": 100}]
    (data.parent / "trace.jsonl").write_text("\n".join(map(json.dumps, trace)))
    arguments = ("calibration", "check", "data.jsonl", "--model", str(tiny_llama), "--traffic", "trace.jsonl")
    told = json.loads(command(*arguments, "--json", cwd=data.parent).out)
    assert told["coverage"]["score_ratio"] == pytest.approx(0.75)
    assert told["coverage"]["reached_ratio"] == pytest.approx(0.75)
    assert any("25% of the traffic is longer than every sample" in warning for warning in told["warnings"])


def test_check_ends_with_2_when_strict_or_without_a_usable_record(data: Path, command: Command) -> None:
    strict = command("calibration", "check", "data.jsonl", "--strict", cwd=data.parent)
    assert strict.code == 2 and "--strict allows none: calibration uses 3 samples" in strict.err
    (data.parent / "bad.jsonl").write_text('{"body": "words that nobody reads"}\n')
    unusable = command("calibration", "check", "bad.jsonl", cwd=data.parent)
    assert unusable.code == 2 and "line 1: none of `text`" in unusable.err and unusable.out == ""
    named = command("calibration", "check", "bad.jsonl", "--field", "text=body", "--json", cwd=data.parent)
    assert named.code == 0 and json.loads(named.out)["report"]["num_used"] == 1


def test_check_names_experts_that_no_token_reaches(tmp_path: Path, command: Command) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    write_byte_tokenizer(tmp_path / "model")
    (tmp_path / "one.txt").write_text("a" * 32)
    arguments = ("calibration", "check", "one.txt", "--model", "model", "--min-expert-tokens")
    shown = command(*arguments, "0", "--json", cwd=tmp_path)
    assert shown.code == 0, shown.err
    told = json.loads(shown.out)
    assert [sorted(load["tokens_per_expert"]) for load in told["experts"]] == [[0, 0, 0, 32]] * 2
    assert any("calibration reaches 2 of 8 experts" in warning for warning in told["warnings"])
    ended = command(*arguments, "1", cwd=tmp_path)
    assert ended.code == 2 and "6 experts see fewer than 1 calibration tokens: model.layers.0.mlp.gate" in ended.err


def test_a_profile_may_name_self_and_nothing_is_written_before_it_is_read(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    profile = write_project(project, tiny_llama)
    profile.write_text(profile.read_text().replace("calibration.jsonl, num_samples: 24", "self, num_samples: 3"))
    monkeypatch.setenv("MODEL_OPTIMIZER_HOME", str(tmp_path / "home"))
    request = read_request(profile)
    store = Store(tmp_path / "store")
    model = resolve_model(request.profile.model, request.base, store, TerminalProgress(Console()))
    source = Composer(request, model, "commit").calibration
    assert source.origin == "self" and not (tmp_path / "home").exists()
    assert source.sampling is not None and (source.sampling.num_sequences, source.sampling.num_tokens) == (4, 64)
    assert source.sampling.model == model.tree and source.tree.path.parent == tmp_path / "home" / "calibration"
