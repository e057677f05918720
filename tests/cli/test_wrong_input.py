"""What bad input gets: one clear line, the right exit code, nothing written.

Every case goes through `main`, the command's own entry, in this process; one of each kind goes through a process of its own too.
"""

import math
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import spoiling as to
from entry import Command
from tiny import write_project

COMMAND = str(Path(sys.executable).with_name("model-optimizer"))
DEAD = "http://127.0.0.1:9/api"


@dataclass(frozen=True)
class Wrong:
    """One case: how a sound project is spoiled, and what must be said."""

    name: str
    spoil: to.Spoil
    words: tuple[str, ...]
    arguments: tuple[str, ...] = ("run", "tiny.yaml")
    code: int = 2
    environment: dict[str, str] = field(default_factory=dict)


RUN = ("run", "tiny.yaml")
QUANTIZE = ("quantize", "--model_path", "model", "--calibration_data", "calibration.jsonl", "--output_path")
FREE = ("quantize", "--model_path", "model", "--output_path", "new")
FLAT = ("--model", "model", "--quantize")
PROFILE = [
    Wrong("no profile", to.nothing, ("absent.yaml", "does not exist"), ("run", "absent.yaml")),
    Wrong("a folder as profile", to.nothing, ("model is a folder", "YAML"), ("run", "model")),
    Wrong("missing field", to.replace("name: tiny\n", ""), ("tiny.yaml:1", "name", "required")),
    Wrong("unknown field", to.replace("concurrency:", "concurency:"), ("tiny.yaml:3", "did you mean 'concurrency'")),
    Wrong("wrong type", to.replace("concurrency: 2", "concurrency: two"), ("tiny.yaml:3", "sla.concurrency", "'two'")),
    Wrong("field stated twice", to.replace("name: tiny\n", "name: tiny\nname: other\n"), ("tiny.yaml:2", "twice", "line 1")),
    Wrong("unknown method", to.replace("scan: {", "scan: {methods: [magic], "), ("scan.methods.0", "'rtn'", "'magic'")),
    Wrong("unknown runtime", to.replace("scan: {", "scan: {runtimes: [magic], "), ("unknown runtime 'magic'", "onnxruntime")),
    Wrong(
        "unknown hardware", to.replace("sla:", "target: {hardware: abacus}\nsla:"), ("unknown device 'abacus'", "known:", "cpu")
    ),
    Wrong(
        "scheme that the target does not run",
        to.replace("sla:", "target: {framework: vllm==0.24.0, hardware: cpu}\nsla:"),
        ("vllm on cpu does not run int8-channel", "take w8a8-int8"),
        code=4,
    ),
    Wrong(
        "interpreter without a framework", to.replace("sla:", "target: {python: bin/python}\nsla:"), ("target.python bin/python",)
    ),
    Wrong("other hardware", to.replace("sla:", "target: {hardware: h200}\nsla:"), ("not this machine",), code=4),
    Wrong("remote code", to.replace('"./model"', '"./model", trust_remote_code: true'), ("trust_remote_code", "False")),
    Wrong("scan without baseline", to.replace("bits: [8, 32]", "bits: [8]"), ("scan.bits is [8.0]", "must hold 32")),
    Wrong(
        "layer pattern without layer",
        to.replace("scan:", "quantization: {skip_layers: [magic]}\nscan:"),
        ("'magic'", "names look"),
    ),
]
SHARDS = [
    Wrong("index names an absent shard", to.sharded(to.misplaced), ("names model-00004-of-00003.safetensors", "absent")),
    Wrong("shard missing on disk", to.sharded(lambda m: (m / to.SHARD.format(2)).unlink()), (to.SHARD.format(2), "absent")),
    Wrong("shard truncated", to.sharded(to.truncate), (to.SHARD.format(2), "header describes", "copy it again")),
    Wrong(
        "overlapping offsets", to.offsets(lambda start, end: (start - 4, end)), ("overlaps its neighbour", "copy the file again")
    ),
    Wrong("hole between offsets", to.offsets(lambda start, end: (start + 4, end + 4)), ("leaves a gap", "copy the file again")),
    Wrong("offsets beyond the end", to.offsets(lambda start, end: (start, end + 10**9)), ("bytes, not",)),
    Wrong("header that is no JSON", to.header(struct.pack("<Q", 12) + b"not a header"), ("unreadable safetensors header",)),
    Wrong("giant header length", to.header(struct.pack("<Q", 2**62)), ("no whole safetensors file", str(2**62))),
    Wrong("tensor in two shards", to.sharded(to.doubled), ("lies in both", to.SHARD.format(1), to.SHARD.format(2))),
    Wrong("weight_map of a wrong type", to.index(weight_map=["model.norm.weight"]), (to.INDEX, "tensor -> shard")),
    Wrong("index with a wrong total", to.index(metadata={"total_size": 12}), ("total_size 12", "the shards hold")),
    Wrong("index that is no JSON", to.sharded(lambda m: (m / to.INDEX).write_text("{")), (to.INDEX, "unreadable")),
    Wrong("shard outside the model", to.index(weight_map={"a": "../a.safetensors"}), ("outside the model directory",)),
]
WEIGHTS = [
    Wrong("no weights", to.remove("model", "model.safetensors"), ("safetensors",)),
    Wrong("truncated weights", lambda f: (f / "model" / "model.safetensors").write_bytes(b"\x10"), ("model.safetensors",)),
    Wrong("pickle weights only", to.pickled, ("pickle weights only (pytorch_model.bin)", "safetensors")),
    Wrong("shape that the config does not ask for", to.config(intermediate_size=96), ("has shape [128, 64]", "[96, 64]")),
    Wrong(
        "integers as weights", to.tensors(lambda t: t | {to.DOWN: t[to.DOWN].astype(np.int8)}), (to.DOWN, "stored as I8", "F32")
    ),
    Wrong("fewer layers than the config", to.config(num_hidden_layers=3), ("lacks model.layers.2", "asks for 3 layers")),
    Wrong("more layers than the config", to.config(num_hidden_layers=1), ("num_hidden_layers is 1", "model.layers.1")),
    Wrong(
        "NaN in a weight",
        to.value_at_one_place(math.nan),
        (to.DOWN, "1 NaN or infinite", "before the first stage"),
        (*QUANTIZE, "new"),
    ),
    Wrong("infinity in a weight", to.value_at_one_place(-math.inf), (to.DOWN, "of 8192"), (*QUANTIZE, "new")),
]
CONFIG = [
    Wrong("no model", to.remove("model"), ("model", "allowed:", "gguf:FILE")),
    Wrong("no config", to.remove("model", "config.json"), ("config.json",)),
    Wrong("config that is no JSON", to.file_at("model", "config.json", content="{"), ("config.json is not JSON",)),
    Wrong("config that is a list", to.file_at("model", "config.json", content="[]"), ("holds list, not an object",)),
    Wrong("config without model_type", to.config(model_type=...), ("model_type is missing",)),
    Wrong("unknown model type", to.config(model_type="mine"), ("'mine' is not known",), code=4),
    Wrong("model that generates no text", to.config(architectures=["BertForMaskedLM"]), ("BertForMaskedLM", "causal"), code=4),
    Wrong(
        "architectures of a wrong type", to.config(architectures="LlamaForCausalLM"), ("architectures is", "list of class names")
    ),
    Wrong("config without layers", to.config(num_hidden_layers=...), ("missing field for num_layers", "n_layer")),
    Wrong("size that is a text", to.config(hidden_size="64"), ("hidden_size is '64'", "positive whole number")),
    Wrong("heads that do not divide the width", to.config(num_attention_heads=5, head_dim=...), ("64 is no multiple", "5")),
    Wrong("heads that do not share evenly", to.config(num_key_value_heads=3), ("4 is no multiple of num_key_value_heads 3",)),
    Wrong("vocabulary other than the embedding", to.config(vocab_size=300), ("vocab_size is 300", "260 rows")),
    Wrong(
        "RoPE fields that disagree",
        to.config(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        ("rope_theta is 500000.0", "10000.0", "leave one"),
    ),
    Wrong("rope_scaling of a wrong type", to.config(rope_scaling="linear"), ("rope_scaling is 'linear'", "an object")),
    Wrong(
        "model that is quantized already", to.config(quantization_config={"quant_method": "gptq"}), ("already quantized",), code=4
    ),
    Wrong("model with a nested config", to.config(text_config={}), ("nested text_config",), code=4),
    Wrong(
        "config that asks for own code",
        to.config(auto_map={"AutoModel": "m.M"}, model_type="mine"),
        ("auto_map", "never executed"),
    ),
    Wrong("code beside an unknown model", to.own_code, ("modeling_mine.py", "never executed")),
    Wrong("no package", to.replace("./model", "package:absent_package"), ("'absent_package' is not installed", "pip install")),
    Wrong("no gguf", to.replace("./model", "gguf:absent.gguf"), ("absent.gguf", "does not exist")),
    Wrong("a file that is no gguf", to.replace("./model", "gguf:tiny.yaml"), ("tiny.yaml", "no readable GGUF")),
    Wrong("hub id without revision", to.replace("./model", "owner/name"), ("owner/name", "revision")),
]
TOKENIZER = [
    Wrong("no tokenizer", to.remove("model", "tokenizer.json"), ("holds no tokenizer", "tokenizer.json")),
    Wrong("tokenizer that is no JSON", to.file_at("model", "tokenizer.json", content="{"), ("tokenizer.json is not JSON",)),
    Wrong("tokenizer without an end", to.without_end, ("no end-of-text token", "eos_token_id")),
    Wrong("tokenizer larger than the model", to.larger_tokenizer, ("up to 4711", "vocab_size is 260")),
]
WORDS = "seven quiet lamps by the river"
CHECK, DATA = ("calibration", "check"), ("calibration.jsonl",)
CALIBRATION = [
    Wrong("no calibration", to.remove("calibration.jsonl"), ("calibration.jsonl", "does not exist")),
    Wrong("calibration folder", to.calibration_folder, ("calibration.jsonl is a folder",)),
    Wrong("empty calibration", to.calibration(""), ("calibration", "0 usable samples")),
    Wrong("calibration that is not UTF-8", to.calibration_bytes(b'{"text": "caf\xe9"}\n'), ("not UTF-8 (byte 13)", "convert it")),
    Wrong("records of a wrong type", to.calibration({"text": 5}, [1]), ("bad 2 (line 1: text:", "`messages`")),
    Wrong("messages without content", to.calibration({"messages": [{"role": "user"}]}), ("bad 1 (line 1: messages.0.content",)),
    Wrong("only duplicates", to.calibration({"text": WORDS}, times=9), ("1 usable samples", "duplicates 8")),
    Wrong("only short texts", to.calibration({"text": "seven lamps"}, {"text": "a river"}), ("shorter than 16 tokens 2",)),
    Wrong("calibration of an unknown kind", to.calibration_at("words.docx", b""), ("words.docx", "known: .json,", ".parquet")),
    Wrong("unknown built-in set", to.replace("calibration.jsonl", '"builtin:novels"'), ("'novels'", "known: code, dialogue")),
    Wrong(
        "calibration array that is empty", to.calibration_at("empty.json", b"[]"), ("empty.json", "0 usable samples", "read 0")
    ),
    Wrong("calibration array that is cut", to.calibration_at("cut.json", b'[{"text"'), ("cut.json is not JSON", "array")),
    Wrong("calibration text that is blank", to.calibration_at("blank.txt", b" \n\n"), ("blank.txt", "0 usable samples")),
    Wrong("Parquet that is none", to.calibration_at("data.parquet", b"PAR1"), ("no whole Parquet file",)),
    Wrong(
        "Parquet without a usable column", to.parquet(number=[1, 2]), ("bad 2 (row 1: none of", "number", "calibration.fields")
    ),
    Wrong(
        "fields that name an absent column",
        to.replace("calibration.jsonl", "calibration.jsonl, fields: {text: bdoy}"),
        ("no field 'bdoy'", "fields: text", "0 usable"),
    ),
    Wrong(
        "fields of two forms",
        to.replace("calibration.jsonl", "calibration.jsonl, fields: {text: a, prompt: b}"),
        ("tiny.yaml:", "text alone", "prompt, text"),
    ),
    Wrong(
        "fields with an unknown role",
        to.replace("calibration.jsonl", "calibration.jsonl, fields: {words: a}"),
        ("words", "'text'"),
    ),
    Wrong("check what is not there", to.nothing, ("absent.jsonl", "does not exist", "builtin:all"), (*CHECK, "absent.jsonl")),
    Wrong("check with a field without column", to.nothing, ("--field 'text'", "ROLE=COLUMN"), (*CHECK, *DATA, "--field", "text")),
    Wrong("check against no trace", to.nothing, ("absent.jsonl", "prompt_tokens"), (*CHECK, *DATA, "--traffic", "absent.jsonl")),
    Wrong("check against what is no trace", to.nothing, ("line 1: prompt_tokens is None",), (*CHECK, *DATA, "--traffic", *DATA)),
    Wrong("check of self without a model", to.nothing, ("`self`", "name the model"), (*CHECK, "self")),
    Wrong("messages without a chat template", to.without_template, ("`messages`", "no chat template", "`text`")),
]
GOLDEN = [
    Wrong("unknown golden set", to.replace("[words]", "[verbs]"), ("'verbs'", "known sets:", "quickstart-en")),
    Wrong("golden set twice", to.replace("[words]", "[words, ./words]"), ("two sets are called 'words'",)),
    Wrong("golden set without items", to.file_at("words", "items.jsonl", content=""), ("items.jsonl", "no items")),
    Wrong("card that is no YAML", to.card("name: words", "name: [words"), ("card.yaml is not YAML",)),
    Wrong("card without a licence", to.card("licence: Apache-2.0\n", ""), ("card.yaml", "licence")),
    Wrong("golden item with a wrong answer index", to.item(answer=7), ("items.jsonl:121", "answer 7 is no index of 2 choices")),
    Wrong("golden item with a used id", to.item(id="w-0003"), ("items.jsonl:121", "'w-0003' was used before")),
    Wrong("golden item that is not UTF-8", to.items(b'{"id": "caf\xe9"}\n'), ("items.jsonl:121: not UTF-8",)),
    Wrong("golden item that is no JSON", to.items(b"{\n"), ("items.jsonl:121: not JSON",)),
    Wrong("golden item in an unknown slice", to.item(slices=["hrad"]), ("'hrad'", "declared: hard, plain")),
    Wrong("slice without items", to.card("slices: {", "slices: {empty: {gates: true}, "), ("slice 'empty' has no items",)),
    Wrong("golden item in the calibration text", to.leak, ("calibration", "golden")),
]
LIMITS = [
    Wrong(
        "traffic longer than the context",
        to.replace("max_model_len: 96", "max_model_len: 20"),
        ("max_model_len 20", "= 28 tokens"),
    ),
    Wrong("context beyond the model's positions", to.replace("max_model_len: 96", "max_model_len: 600"), ("600", "at most 512")),
    Wrong(
        "first token later than the answer",
        to.replace("sla: {", "sla: {ttft_p95_ms: 900, p99_latency_ms: 500, "),
        ("tiny.yaml:3", "ttft_p95_ms 900 is above p99_latency_ms 500"),
    ),
    Wrong(
        "latency limits that fall",
        to.replace("sla: {", "sla: {p50_latency_ms: 900, p99_latency_ms: 500, "),
        ("p50_latency_ms 900 is above p99_latency_ms 500",),
    ),
    Wrong("limit that is infinite", to.replace("sla: {", "sla: {p95_latency_ms: .inf, "), ("p95_latency_ms", "finite")),
    Wrong(
        "memory below the weights alone", to.replace("sla: {", "sla: {memory_gib: 0.00009, "), ("weights alone", "8 bits"), code=4
    ),
    Wrong(
        "traffic percentiles that fall", to.replace("{p50: 12, p95: 20", "{p50: 22, p95: 20"), ("percentiles must rise", "p50 22")
    ),
    Wrong("a batch limit that nothing reads", to.replace("sla: {", "sla: {max_batch: 1, "), ("sla.max_batch", "unknown field")),
]
PLACES = [
    Wrong("output exists", to.folder_at("out"), ("out exists", "new directory"), (*QUANTIZE, "out")),
    Wrong("a file where the home folder should be", to.file_at(".model-optimizer"), (".model-optimizer is a file",)),
    Wrong("a file where the store should be", to.file_at(".model-optimizer", "store"), ("store is a file",)),
    Wrong("plan with a file as store", to.file_at(".model-optimizer", "store"), ("store", "is a file"), ("plan", "tiny.yaml")),
    Wrong("quantize with a file as store", to.file_at(".model-optimizer", "store"), ("store is a file",), (*QUANTIZE, "new")),
    Wrong("signing key that is a folder", to.folder_at("signer", "key.pem"), ("key.pem is a folder",)),
    Wrong("signing key that is none", to.file_at("signer", "key.pem"), ("key.pem is no unencrypted private key",)),
    Wrong("signing key below a file", to.file_at("signer"), ("signer is a file",)),
    Wrong("init over a file", to.nothing, ("tiny.yaml exists",), ("init", "tiny.yaml")),
    Wrong("init below a file", to.nothing, ("tiny.yaml is a file",), ("init", "tiny.yaml/new.yaml")),
    Wrong("output below a file", to.nothing, ("tiny.yaml is a file",), (*QUANTIZE, "tiny.yaml/new")),
    Wrong("verify what is not there", to.nothing, ("absent", "missing"), ("verify-bundle", "absent"), code=6),
    Wrong("report without a bundle", to.nothing, ("no bundle", "model-optimizer run"), ("report",)),
    Wrong(
        "Prefect server that is dead", to.nothing, (DEAD, "does not answer", "unset it"), environment={"PREFECT_API_URL": DEAD}
    ),
    Wrong(
        "Prefect address that is none",
        to.nothing,
        ("'localhost:4200'", "allowed: http(s)://HOST:PORT/api"),
        environment={"PREFECT_API_URL": "localhost:4200"},
    ),
    Wrong(
        "MLflow address that is none",
        to.nothing,
        ("'magic://there'", "sqlite:///FILE"),
        environment={"MLFLOW_TRACKING_URI": "magic://there"},
    ),
    Wrong(
        "MLflow address without a host", to.nothing, ("'http://'", "HOST:PORT"), environment={"MLFLOW_TRACKING_URI": "http://"}
    ),
]
COMMANDS = [
    Wrong("unknown command", to.nothing, ("frobnicate", "--help"), ("frobnicate",)),
    Wrong("unknown option", to.nothing, ("--frobnicate", "--help"), (*RUN, "--frobnicate")),
    Wrong("no profile named", to.nothing, ("profile", "Missing argument"), ("run",)),
    Wrong("override without a value", to.nothing, ("--set", "requires an argument"), (*RUN, "--set")),
    Wrong("override without =", to.nothing, ("key=value", "'nonsense'"), (*RUN, "--set", "nonsense")),
    Wrong("override of an unknown field", to.nothing, ("sla.magic", "unknown field", "allowed:"), (*RUN, "--set", "sla.magic=1")),
    Wrong("override of a wrong type", to.nothing, ("sla.concurrency", "'many'"), (*RUN, "--set", "sla.concurrency=many")),
    Wrong("option of a wrong type", to.nothing, ("--bits", "valid number"), (*QUANTIZE, "new", "--bits", "many")),
    Wrong("unknown stage", to.nothing, ("--from", "'magic'", "'scan'"), (*RUN, "--from", "magic")),
    Wrong(
        "stages in the wrong order",
        to.nothing,
        ("--until profile", "before --from scan"),
        (*RUN, "--from", "scan", "--until", "profile"),
    ),
    Wrong("stage asked for twice", to.nothing, ("--only scan", "leave out"), (*RUN, "--only", "scan", "--from", "scan")),
    Wrong("stage whose predecessors are missing", to.nothing, ("--from verify", "profile"), (*RUN, "--from", "verify")),
    Wrong("quantize with an unknown method", to.nothing, ("'magic'", "rtn"), (*QUANTIZE, "new", "--quant_method", "magic")),
    Wrong("quantize to 5000 bits", to.nothing, ("5000",), (*QUANTIZE, "new", "--bits", "5000")),
    Wrong("unknown format", to.nothing, ("'int9'", "int4-g64", "gguf:q4_k_m"), (*QUANTIZE, "new", "--format", "int9")),
    Wrong("unknown GGUF recipe", to.nothing, ("'q9'", "known:", "q4_k_m"), (*QUANTIZE, "new", "--format", "gguf:q9")),
    Wrong("format and bits", to.nothing, ("--format int4", "--bits 4"), (*QUANTIZE, "new", "--format", "int4", "--bits", "4")),
    Wrong("data-free with data", to.nothing, ("--data-free", "contradict"), (*QUANTIZE, "new", "--data-free")),
    Wrong("gptq without data", to.nothing, ("gptq", "--calibration-data"), (*FREE, "--data-free", "--quant_method", "gptq")),
    Wrong("mixed bits without data", to.nothing, ("--bits 6.5", "--calibration-data"), (*FREE, "--bits", "6.5")),
    Wrong("gptq into GGUF", to.nothing, ("gguf:q8_0", "gptq"), (*FREE, "--format", "gguf:q8_0", "--quant_method", "gptq")),
    Wrong("engine without data", to.nothing, ("held out", "--calibration-data"), (*FREE, "--compile-level", "1")),
    Wrong("dry run of an unknown format", to.nothing, ("'int9'", "known:"), (*FREE, "--dry-run", "--format", "int9")),
    Wrong("flat form onto a folder", to.nothing, ("model exists", "new directory"), (*FLAT, "int8", "--output", "model")),
    Wrong("flat form of an unknown format", to.nothing, ("'int9'", "known:"), (*FLAT, "int9", "--output", "new")),
]
CASES = [*PROFILE, *SHARDS, *WEIGHTS, *CONFIG, *TOKENIZER, *CALIBRATION, *GOLDEN, *LIMITS, *PLACES, *COMMANDS]
ALONE = (
    "unknown field",
    "shard truncated",
    "only duplicates",
    "memory below the weights alone",
    "verify what is not there",
    "Prefect server that is dead",
    "unknown option",
)
"""One of each kind and exit code, run as a user does."""


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path.relative_to(folder)), path.lstat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    shutil.copytree(tiny_llama, folder / "model")
    write_project(folder, folder / "model")
    return folder


@pytest.fixture
def folder(tmp_path: Path, pristine: Path) -> Path:
    copy = tmp_path / "project"
    shutil.copytree(pristine, copy)
    profile = copy / "tiny.yaml"
    profile.write_text(profile.read_text().replace(str(pristine / "signer"), str(copy / "signer")).replace(str(pristine), "."))
    return copy


def check(case: Wrong, code: int, out: str, err: str) -> None:
    assert code == case.code, err
    assert [word for word in case.words if word not in err] == [], err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
    assert out == ""


def test_cases_are_different_and_at_least_48() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 48
    assert set(ALONE) <= {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_input_gets_one_line_and_its_exit_code(
    folder: Path, case: Wrong, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.spoil(folder)
    before = listing(folder)
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    ended = command(*case.arguments, cwd=folder)
    check(case, ended.code, ended.out, ended.err)
    assert listing(folder) == before


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ALONE], ids=lambda case: case.name)
def test_wrong_input_ends_a_process_of_its_own_alike(folder: Path, case: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    case.spoil(folder)
    before = listing(folder)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([COMMAND, *case.arguments], cwd=folder, capture_output=True, text=True, timeout=300)
    check(case, done.returncode, done.stdout, done.stderr)
    assert listing(folder) == before
