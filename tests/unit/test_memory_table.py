"""The budget table of an 8B shape, worked by hand: parts, capacity, what would help, symptoms."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from model_optimizer.errors import ConfigError
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.registry import FORMATS
from model_optimizer.memory.budget import activation_bytes
from model_optimizer.memory.config import MemoryConfig
from model_optimizer.memory.plan import Demand
from model_optimizer.memory.subject import Subject, read_subject
from model_optimizer.memory.table import Asked, DeviceMemory, headline, memory_table
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.quantization.layers import read_layers
from model_optimizer.spec import Lengths, Sla, Traffic

GIB = 2**30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
LINEAR = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
PARAMETERS = LINEAR + 2 * 128256 * 4096 + 65 * 4096
TRAFFIC = Traffic(prompt_tokens=Lengths(p50=2000, p95=3000, max=3000), output_tokens=Lengths(p50=300, p95=1000, max=1000))
DEVICE = DeviceMemory("a GPU", 80 * GIB, 600 * 2**20, 0, "bfloat16")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("llama-8b")
    (directory / "config.json").write_text(json.dumps(LLAMA_8B))
    return read_subject(directory)


def asked(memory_gib: float | None = None, runtime: str = "vllm", **memory: str | int) -> Asked:
    sla = Sla(concurrency=4, max_model_len=4096, memory_gib=memory_gib)
    return Asked(Demand(sla, TRAFFIC, MemoryConfig.model_validate(memory)), DEVICE, runtime)


def test_read_subject_counts_a_model_that_has_only_dimensions(subject: Subject) -> None:
    assert (subject.num_parameters, subject.num_linear_parameters) == (PARAMETERS, LINEAR)
    assert PARAMETERS == 8_030_261_248  # the published 8B
    assert subject.stored_bytes is None


def test_read_subject_counts_bytes_of_stored_weights(tiny_llama: Path) -> None:
    found = read_subject(tiny_llama)
    assert found.stored_bytes == 4 * found.num_parameters
    assert found.tied_head
    assert found.resident_bytes("onnxruntime", None, "float32", packed=False) == found.stored_bytes + 4 * 260 * 64


def test_resident_bytes_of_packed_weights_hold_what_is_no_code_in_the_type_that_runs(tiny_llama: Path, tmp_path: Path) -> None:
    headers, int8 = read_headers(tiny_llama), FORMATS.get("int8-channel")
    plan = {layer.name: "int8-channel" for layer in read_layers(tiny_llama).linears}
    write_checkpoint(tiny_llama, tmp_path / "q", plan, lambda name: int8.quantize(read_tensor(headers[f"{name}.weight"]).float()))
    found, whole = read_subject(tmp_path / "q"), read_subject(tiny_llama)
    assert found.stored_bytes is not None
    num_plain = whole.num_parameters - whole.num_linear_parameters
    assert (found.num_plain_parameters, found.plain_bytes) == (num_plain, 4 * num_plain)  # stored as float32
    assert found.resident_bytes("torch", None, "float32", packed=True) == found.stored_bytes
    assert found.resident_bytes("torch", None, "bfloat16", packed=True) == found.stored_bytes - 2 * num_plain
    assert found.resident_bytes("vllm", None, "bfloat16", packed=True) == found.stored_bytes


@pytest.mark.parametrize(
    ("runtime", "bits", "packed", "expected"),
    [
        ("vllm", None, False, 2 * PARAMETERS),
        ("vllm", 4.0, False, LINEAR * 33 // 64 + 2 * (PARAMETERS - LINEAR)),  # 4.125 bits = 33 / 64 bytes
        ("torch", 4.0, False, 2 * PARAMETERS),  # unpacked at load
        ("torch", 4.0, True, LINEAR * 33 // 64 + 2 * (PARAMETERS - LINEAR)),
    ],
)
def test_resident_bytes_depends_on_what_the_runtime_unpacks(
    subject: Subject, runtime: str, bits: float | None, packed: bool, expected: int
) -> None:
    assert subject.resident_bytes(runtime, bits, "bfloat16", packed=packed) == expected


def test_memory_table_adds_up_and_counts_requests(subject: Subject) -> None:
    table = memory_table(subject, asked())
    lines = {line.part: line.num_bytes for line in table.budget}
    assert sum(lines.values()) == table.usable_bytes == int(0.9 * 80 * GIB)
    assert lines["weights"] == 2 * PARAMETERS
    assert lines["kv_reservation"] == 4 * 4096 * 131_072
    assert lines["activations"] == activation_bytes(subject.shape, 512, 4, 2)  # a chunk of 512, not the prompt of 3000
    assert lines["workspace"] == 4 * 4000 * 2 * 8 * 128 * 2
    assert (table.fits, table.tokens_per_request, table.capacity_requests, table.capacity_full_requests) == (True, 4000, 4, 4)
    # 4 x 256 pages; a typical request has 2300 tokens, 144 pages
    assert headline(table) == "fits: 4 requests of 4000 tokens at once (7 typical, 4 of the longest)"


def test_memory_table_says_by_how_much_it_does_not_fit(subject: Subject) -> None:
    table = memory_table(subject, asked(memory_gib=8))
    margin = next(line.num_bytes for line in table.budget if line.part == "margin")
    assert (table.runs, table.fits, table.capacity_requests) == (False, False, 0)
    assert margin == 8 * GIB - sum(line.num_bytes for line in table.budget if line.part != "margin") < -7 * GIB
    assert headline(table) == "does not fit: not even one request of 4000 tokens"


def test_memory_table_of_8b_int4_with_four_streams_of_4k_within_8_gib(subject: Subject) -> None:
    table = memory_table(subject, replace(asked(memory_gib=8, breathing_room_ratio=0.0, kv_precision="fp8"), bits=4.0))
    assert table.fits
    assert (table.capacity_requests, table.kv.precision) == (4, "fp8")
    assert table.kv.pool_bytes == 4 * 4096 * 65_536 + 4 * 256 * 32 * 2 * 8 * 4


def test_options_come_most_first_with_bytes_that_are_really_saved(subject: Subject) -> None:
    table = memory_table(subject, asked(memory_gib=8))
    saved = {option.change: option.saved_bytes for option in table.options}
    assert list(saved.values()) == sorted(saved.values(), reverse=True)
    assert table.options[0].change == "linear weights in 4 bits, kept packed"
    assert saved["linear weights in 4 bits, kept packed"] == 2 * LINEAR - LINEAR * 33 // 64
    scales = 4 * 256 * 32 * 2 * 8 * 4
    through_float32 = 4 * 4000 * 2 * 8 * 128 * (6 - 2)
    assert saved["KV cache in fp8"] == 4 * 4096 * 65_536 - scales - through_float32
    assert saved["max_model_len 4000, the longest stated request"] == 4 * (256 - 250) * 16 * 131_072
    assert not any(option.fits_then for option in table.options)


def test_options_say_which_alone_makes_it_fit(subject: Subject) -> None:
    table = memory_table(subject, asked(memory_gib=16))
    fitting = {option.change for option in table.options if option.fits_then}
    assert fitting == {"linear weights in 4 bits, kept packed", "linear weights in 8 bits, kept packed"}


def test_options_offer_dropping_pages_behind_a_sliding_window(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"model_type": "mistral", "sliding_window": 1024}))
    table = memory_table(read_subject(tmp_path), asked())
    saved = {option.change: option.saved_bytes for option in table.options}
    assert saved["drop pages behind the sliding window"] == 4 * (256 - 65) * 16 * 131_072


def test_symptoms_tell_load_from_run_and_name_low_bits_that_are_not_in_use(subject: Subject) -> None:
    unpacking = memory_table(subject, replace(asked(runtime="torch"), bits=4.0))
    assert {row.when for row in unpacking.symptoms} == {"load", "run"}
    row = next(row for row in unpacking.symptoms if row.cause.startswith("low bits"))
    assert row.here == "torch holds 14.96 GiB of 5.309 GiB stored; that is the unpacked size"
    packed = memory_table(subject, replace(asked(runtime="torch"), bits=4.0, packed=True))
    assert "unpacked size" not in next(row.here for row in packed.symptoms if row.cause.startswith("low bits"))


def test_memory_table_of_a_latent_cache(tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "vocab_size": 128, "max_position_embeddings": 4096, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = memory_table(read_subject(tmp_path), asked())
    assert table.attention == "MLA: 3 full_attention layers"
    assert table.kv.bytes_per_token == 3 * 40 * 2


def test_read_subject_refuses_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        read_subject(tmp_path)
