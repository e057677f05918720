"""Broken engines, graphs, checkpoints and targets: one line that says what to do, the right exit code, nothing half-written."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import onnx
import pytest
from entry import Command
from safetensors.torch import load_file, save_file
from serving_fixtures import write_onnx_model
from tiny import WORDS

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.gpu_results import gpu_key, write_timings
from model_optimizer.compilation.registry import TARGETS, BuildRequest
from model_optimizer.errors import IntegrityError
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.store import Store

HERE = metadata.version("onnxruntime")
Spoil = Callable[[Path], object]


@dataclass(frozen=True)
class Broken:
    """One broken input: how it is made, what the user calls, what must be said."""

    name: str
    spoil: Spoil
    arguments: tuple[str, ...]
    code: int
    words: tuple[str, ...]


def graph(change: Callable[[onnx.ModelProto], object]) -> Spoil:
    """Change the graph of the served model."""

    def spoil(folder: Path) -> None:
        path = folder / "onnx" / "model.onnx"
        model = onnx.load(path, load_external_data=False)
        change(model)
        onnx.save(model, path)

    return spoil


def first_node_is_custom(model: onnx.ModelProto) -> None:
    model.graph.node[0].domain = "com.vendor"
    model.graph.node[0].op_type = "FusedMagic"


def states_opset(version: int) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = version

    return change


def cut(name: str, share: float) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return spoil


def sidecar(runtime: str, **stated: str) -> Spoil:
    """Lay an engine of 16 bytes beside the model, and what built it."""

    def spoil(folder: Path) -> None:
        place = folder / "model" / "engines" / runtime
        place.mkdir(parents=True)
        (place / "model.plan").write_bytes(bytes(16))
        origin = {
            "runtime": runtime,
            "framework_version": HERE,
            "optimizer_version": metadata.version("model-optimizer-pipeline"),
        }
        (place / "engine.json").write_text(json.dumps(origin | stated))

    return spoil


def wrong_scales(folder: Path) -> None:
    """Store a checkpoint in groups of 32 and take half of one layer's scales away."""
    headers = read_headers(folder / "model")
    layers = [name.removesuffix(".weight") for name in headers if "_proj" in name]
    number = FORMATS.get("int4-g32")
    plan = dict.fromkeys(layers, number.name)
    rounded = {layer: number.quantize(read_tensor(headers[f"{layer}.weight"]).float()) for layer in layers}
    write_checkpoint(folder / "model", folder / "quantized", plan, rounded.__getitem__)
    tensors = load_file(folder / "quantized" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    tensors[name] = tensors[name][:, :1].contiguous()
    save_file(tensors, folder / "quantized" / "model.safetensors")


def other_activation(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu"}))


def nothing(_folder: Path) -> None:
    return None


SERVE = ("serve", "--config", "serve.yaml", "--port", "0", "--model_path")
QUANTIZE = ("quantize", "--model_path", "model", "--output_path", "new", "--format")
CALIBRATED = ("--calibration_data", "calibration.jsonl", "--target-framework")
CASES = [
    Broken(
        "custom operator", graph(first_node_is_custom), (*SERVE, "onnx"), 4, ("com.vendor::FusedMagic", "serve it with torch")
    ),
    Broken("truncated graph", cut("onnx/model.onnx", 0.5), (*SERVE, "onnx"), 6, ("model.onnx is cut short", "build the engine")),
    Broken(
        "truncated data", cut("onnx/model.onnx.data", 0.5), (*SERVE, "onnx"), 6, ("model.onnx.data is cut short: ", "refers to")
    ),
    Broken(
        "missing data", lambda it: (it / "onnx" / "model.onnx.data").unlink(), (*SERVE, "onnx"), 6, ("lacks model.onnx.data",)
    ),
    Broken("opset too old", graph(states_opset(17)), (*SERVE, "onnx"), 4, ("states opset 17, which has no", "build the engine")),
    Broken("opset of the future", graph(states_opset(99)), (*SERVE, "onnx"), 4, ("states opset 99", "newest that is known")),
    Broken(
        "other framework version at load",
        sidecar("onnxruntime", framework_version="1.20.0"),
        (*SERVE, "model"),
        4,
        (f"framework: built with onnxruntime 1.20.0, found onnxruntime {HERE}", "build it again here"),
    ),
    Broken(
        "engine of another optimizer",
        sidecar("onnxruntime", optimizer_version="0.0.9"),
        (*SERVE, "model"),
        4,
        ("optimizer: built with 0.0.9, found ", "build it again here"),
    ),
    Broken(
        "damaged sidecar",
        sidecar("onnxruntime", magic="1"),
        (*SERVE, "model"),
        6,
        ("engine.json does not say what built the engine", "build the engine again"),
    ),
    Broken(
        "scales that do not fit", wrong_scales, ("diagnose", "model", "quantized", *CALIBRATED[:2]), 6, ("up_proj", "(128, 2)")
    ),
    Broken(
        "unsupported scheme",
        nothing,
        (*QUANTIZE, "int3-g32", "--target-framework", "vllm==0.24.0", "--target-device", "sm89"),
        4,
        ("vllm on sm89 does not run int3-group", "it runs float, ", "take int4-g64"),
    ),
    Broken(
        "unsupported GPU",
        nothing,
        (*QUANTIZE, "int4-g32", "--target-framework", "tensorrt", "--target-device", "sm90"),
        4,
        ("tensorrt on sm90 does not run int4-group", "target vllm or onnxruntime"),
    ),
    Broken(
        "unsupported architecture",
        other_activation,
        (*QUANTIZE, "int4-g32", *CALIBRATED, "onnxruntime"),
        4,
        ("activation 'gelu' is not silu", "target torch or vllm"),
    ),
    Broken(
        "other framework version as target",
        nothing,
        (*QUANTIZE, "int4-g32", *CALIBRATED, "onnxruntime==1.20.0"),
        4,
        (f"this environment has onnxruntime {HERE}", "install onnxruntime==1.20.0 there, or state"),
    ),
    Broken(
        "target that is no name",
        nothing,
        (*QUANTIZE, "int4-g32", "--target-framework", "vllm=0.24"),
        2,
        ("'vllm=0.24' is no NAME or NAME==VERSION", "vllm==0.24.0"),
    ),
    Broken(
        "unknown framework",
        nothing,
        (*QUANTIZE, "int4-g32", "--target-framework", "magic"),
        2,
        ("unknown target framework 'magic'",),
    ),
    Broken(
        "interpreter that is not there",
        nothing,
        (*QUANTIZE, "int4-g32", "--target-framework", "vllm", "--target-python", "nowhere/python"),
        2,
        ("target.python nowhere/python is no file", "ENV/bin/python"),
    ),
    Broken(
        "interpreter without the framework",
        nothing,
        (*QUANTIZE, "int4-g32", "--target-framework", "vllm", "--target-python", sys.executable),
        4,
        ("has no vllm; install it there: ",),
    ),
    Broken(
        "interpreter without a framework that is named",
        nothing,
        (*QUANTIZE, "int4-g32", "--target-python", sys.executable),
        2,
        ("is the interpreter of no framework; add --target-framework",),
    ),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    shutil.copytree(tiny_llama, folder / "model")
    write_onnx_model(tiny_llama, folder / "onnx")
    (folder / "serve.yaml").write_text("engine: onnxruntime\n")
    (folder / "calibration.jsonl").write_text("\n".join(json.dumps({"text": " ".join(WORDS) + f" {at}"}) for at in range(12)))
    return folder


def listed(folder: Path) -> dict[str, int]:
    """Every file but the store's, with its size."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(it.relative_to(folder)): it.stat().st_size for it in files if ".model-optimizer" not in it.parts}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_target_is_refused_in_one_line(case: Broken, prepared: Path, tmp_path: Path, command: Command) -> None:
    folder = shutil.copytree(prepared, tmp_path / "project")
    case.spoil(folder)
    before = listed(folder)
    ended = command(*case.arguments, cwd=folder)
    assert (ended.code, ended.out) == (case.code, ""), ended.err
    assert all(words in ended.err for words in case.words), ended.err
    (line,) = [line for line in ended.err.splitlines() if line.startswith("model-optimizer: ")]
    assert ended.err.endswith(f"{line}\n") and "Traceback" not in ended.err
    assert listed(folder) == before
    assert not list(folder.rglob("artifact.json"))  # nothing counts as done


def test_an_engine_of_another_gpu_says_every_field_and_no_other_backend_takes_over(
    prepared: Path, tmp_path: Path, command: Command
) -> None:
    """QA-062: a sidecar, a dummy engine of 16 bytes, a host without TensorRT."""
    folder = shutil.copytree(prepared, tmp_path / "project")
    sidecar("tensorrt", framework_version="8.2.1", compute_capability="sm86", driver="470.57")(folder)
    (folder / "serve.yaml").write_text("engine: tensorrt\n")
    ended = command(*SERVE, "model", cwd=folder)
    assert (ended.code, ended.out) == (4, "")
    assert "framework: built with tensorrt 8.2.1, found tensorrt " in ended.err
    assert "GPU: built with sm86, found none" in ended.err and "driver: built with 470.57, found none" in ended.err
    assert "build it again here: `model-optimizer quantize ... --target-framework tensorrt`" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("kind", ["garbage", "another GPU", "cut short"])
def test_a_damaged_or_foreign_timing_cache_is_refused_before_anything_is_built(
    kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    store, work = Store(tmp_path / "store"), tmp_path / "work"
    work.mkdir()
    wanted = gpu_key(trt.__name__, trt.__version__, "sm89")
    path = store.root / "timings" / f"{wanted.name}.cache"
    write_timings(path, wanted if kind == "cut short" else wanted.model_copy(update={"compute_capability": "sm86"}), bytes(64))
    path.write_bytes({"garbage": b"\x00\x01noise", "cut short": path.read_bytes()[:-7]}.get(kind, path.read_bytes()))
    config = CompileConfig(tensorrt_gpu="sm89")
    request = BuildRequest(Tree.of(tiny_llama), tiny_llama, WeightRecipe(), config, "test", store)
    (variant,) = TARGETS.get("tensorrt").variants(WeightRecipe())
    said = "compute_capability sm86 .wanted sm89" if kind == "another GPU" else "is damaged"
    with pytest.raises(IntegrityError, match=f"{said}.*remove it, and the build measures anew") as refused:
        TARGETS.get("tensorrt").build(request, variant, work)
    assert refused.value.exit_code == 6
    assert not list(work.iterdir()) and not (store.root / "export").exists()


def test_targets_prints_the_matrix_with_every_reason(tmp_path: Path, command: Command) -> None:
    ended = command("targets", "vllm", "--device", "sm90", "--json", cwd=tmp_path)
    (vllm,) = json.loads(ended.out)
    assert (ended.code, vllm["loads"], vllm["load_canary"]) == (0, "checkpoint", True)
    assert vllm["schemes"]["int4-group"]["sm90"]["standing"] == "measured"
    refused = vllm["schemes"]["int3-group"]["sm90"]
    assert (refused["standing"], refused["instead"]) == ("refused", "take int4-g64 or w8a8-int8")
    table = command("targets", cwd=tmp_path)
    assert table.code == 0 and all(f"{name} (loads: " in table.out for name in ("llamacpp", "onnxruntime", "tensorrt", "vllm"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("onnxruntime==1.20.0",), 4, "install onnxruntime==1.20.0 there"),
        (("vllm", "--device", "gpu"), 2, "device 'gpu' is unknown; allowed: cpu, or a compute capability"),
        (("magic",), 2, "unknown target framework 'magic'; known: llamacpp, "),
    ],
)
def test_targets_refuses_what_it_does_not_know(
    arguments: tuple[str, ...], code: int, words: str, tmp_path: Path, command: Command
) -> None:
    ended = command("targets", *arguments, cwd=tmp_path)
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)
    assert words in ended.err
