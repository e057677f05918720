"""`model-optimizer memory`: the table, its JSON, what exit codes mean, and what a wrong input is told."""

import json
from pathlib import Path

import pytest
from entry import Command

from model_optimizer.memory.kv_layout import KvLayout
from model_optimizer.memory.kv_storage import KvStorage
from model_optimizer.models.facts import read_facts

SMALL = ("--device", "cpu", "--sla", "concurrency=3", "--sla", "max_model_len=512")


def test_memory_prints_budget_capacity_options_and_symptoms(command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    ended = command("memory", str(tiny_llama), *SMALL, cwd=tmp_path)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert "GQA: 2 full_attention layers" in lines[0]
    parts = ["weights", "kv_reservation", "activations", "workspace", "runtime_context", "process", "margin"]
    assert [line.split()[0] for line in lines[2:9]] == parts
    assert "fits: 4 requests of 384 tokens at once (16 typical, 3 of the longest)" in ended.out
    assert ended.out.index("KV cache in fp8") > ended.out.index("what would help, most first")
    assert "low bits are not really in use" in ended.out


def test_memory_json_agrees_with_what_the_storage_allocates(command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    ended = command("memory", str(tiny_llama), *SMALL, "--memory", "kv_precision=int8", "--json", cwd=tmp_path)
    table = json.loads(ended.out)
    plan = table["kv"]
    assert plan["num_pages"] == 3 * 32
    storage = KvStorage(KvLayout.of(read_facts(tiny_llama), plan["page_tokens"], plan["precision"]), plan["num_pages"])
    reserved = next(line["num_bytes"] for line in table["budget"] if line["part"] == "kv_reservation")
    assert reserved == storage.num_bytes == 96 * (16 * 128 + 32)
    assert sum(line["num_bytes"] for line in table["budget"]) == table["usable_bytes"]


def test_memory_measures_page_sizes_on_request_and_remembers_them(command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    arguments = ("memory", str(tiny_llama), *SMALL, "--memory", "page_tokens=auto", "--json")
    first, second = (json.loads(command(*arguments, cwd=tmp_path).out) for _ in range(2))
    assert first["decisions"] == second["decisions"]
    (decision,) = first["decisions"]
    assert decision["subject"] == "page size"
    assert first["kv"]["page_tokens"] == decision["numbers"]["page_tokens"] == 8  # 80 tokens: every size wastes over 4 %


def test_memory_exits_4_and_prints_the_table_when_nothing_fits(command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    ended = command("memory", str(tiny_llama), *SMALL, "--sla", "memory_gib=0.5", cwd=tmp_path)
    assert ended.code == 4
    assert "margin" in ended.out
    assert "not even one request of 384 tokens" in ended.err


def test_memory_takes_a_device_of_the_catalogue_and_a_folder_of_dimensions(command: Command, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    ended = command("memory", "m", "--device", "rtx-4090", "--runtime", "vllm", "--json", cwd=tmp_path)
    table = json.loads(ended.out)
    assert table["kv"]["bytes_per_token"] == 131_072
    assert {line["part"]: line["num_bytes"] for line in table["budget"]}["weights"] == 2 * 8_030_261_248
    assert table["fits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sla", "concurrency"), "--sla 'concurrency' names no value; write --sla KEY=VALUE"),
        (("--sla", "streams=4"), "--sla streams: Extra inputs are not permitted; seen: 4"),
        (("--traffic", "prompt_tokens.p95.x=4"), "'p95' has no parts"),
        (("--memory", "page_tokens=0"), "give 1 to 256 tokens, or auto"),
        (("--memory", "kv_precision=int4"), "--memory kv_precision: Input should be 'auto', 'float32'"),
        (("--device", "abacus"), "unknown device 'abacus'; known: auto, cpu"),
        (("--runtime", "abacus"), "--runtime 'abacus' is unknown; known: torch"),
        (("--bits", "40"), "--bits is 40; give 1 to 16"),
    ],
)
def test_memory_says_what_is_wrong_with_an_input(
    command: Command, tiny_llama: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    ended = command("memory", str(tiny_llama), *arguments, cwd=tmp_path)
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1


def test_memory_refuses_a_model_that_is_not_there(command: Command, tmp_path: Path) -> None:
    ended = command("memory", "./absent", cwd=tmp_path)
    assert ended.code == 2
    assert "absent" in ended.err
