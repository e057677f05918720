"""What TensorRT is given, held against ONNX Runtime, and the engines that it makes for GPUs that are not here."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.compiled import FusedOp, Layout
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.dequantized import dequantized_graph, packed_nibbles
from model_optimizer.compilation.export import export_model
from model_optimizer.compilation.export_stage import exported
from model_optimizer.compilation.graph_form import GraphForm
from model_optimizer.compilation.registry import TARGETS, BuildRequest
from model_optimizer.compilation.targets.tensorrt import FORM, shape_profiles
from model_optimizer.compilation.tensorrt_engine import build_plan
from model_optimizer.compilation.tensorrt_log import PHASE, build_time, last_phase, layers_of, seen_integer
from model_optimizer.compilation.worker import Range, TensorRtBuild
from model_optimizer.errors import CompileError, UnsupportedError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.quantization.registry import METHODS
from model_optimizer.spec import Lengths, Sla, Traffic
from model_optimizer.store import Store

BATCH, NEW, PAST = 2, 5, 3


def outputs(graph: Path) -> list[NDArray[np.float32]]:
    """Run a graph as it stands: a runtime's own fusions would round inputs."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), options)
    generator = np.random.default_rng(0)
    feeds: dict[str, NDArray[np.generic]] = {
        "input_ids": generator.integers(0, 250, (BATCH, NEW)),
        "attention_mask": np.ones((BATCH, PAST + NEW), np.int64),
        "position_ids": np.tile(np.arange(PAST, PAST + NEW), (BATCH, 1)),
        "logits_from": np.array([0]),
    }
    for tensor in session.get_inputs():
        if tensor.name.startswith("past"):
            values = generator.standard_normal((BATCH, tensor.shape[1], PAST, tensor.shape[3]))
            feeds[tensor.name] = values.astype(np.float16 if "float16" in tensor.type else np.float32)
    return [output.astype(np.float32) for output in session.run(None, feeds)]


def quantized(source: Path, folder: Path, name: str, method: str = "rtn") -> Path:
    headers, weight_format = read_headers(source), FORMATS.get(name)
    layers = [key.removesuffix(".weight") for key in headers if "_proj" in key]

    def rounded(layer: str) -> QuantizedTensor:
        return METHODS.get(method).quantize(read_tensor(headers[f"{layer}.weight"]).float(), weight_format)

    write_checkpoint(source, folder, dict.fromkeys(layers, name), rounded)
    return folder


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[NDArray[np.float32]]:
    folder = tmp_path_factory.mktemp("plain")
    export_model(tiny_llama, folder)
    return outputs(folder / "model.onnx")


@pytest.mark.parametrize(
    ("explicit", "dtype", "most"), [(True, "float32", 1e-5), (False, "float16", 0.03), (True, "float16", 0.03)]
)
def test_graph_forms_compute_the_same(
    plain: list[NDArray[np.float32]], tiny_llama: Path, tmp_path: Path, explicit: bool, dtype: str, most: float
) -> None:
    export_model(tiny_llama, tmp_path, GraphForm(explicit_cache=explicit, dtype=dtype))
    graph = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph
    assert ("Attention" in {node.op_type for node in graph.node}) is not explicit
    for seen, expected in zip(outputs(tmp_path / "model.onnx"), plain, strict=True):
        assert np.abs(seen - expected).max() < most


@pytest.mark.parametrize(("name", "method"), [("int8-channel", "rtn"), ("int4-g32", "rtn-mse"), ("int3-g32", "rtn-mse")])
def test_dequantized_graph_computes_what_the_checkpoint_does(tiny_llama: Path, tmp_path: Path, name: str, method: str) -> None:
    checkpoint = quantized(tiny_llama, tmp_path / "checkpoint", name, method)
    load_dequantized(checkpoint).save_pretrained(tmp_path / "unpacked")
    form = GraphForm(explicit_cache=True)
    export_model(tiny_llama, tmp_path / "export", form)
    export_model(tmp_path / "unpacked", tmp_path / "expected", form)
    (tmp_path / "graph").mkdir()
    model, fused = dequantized_graph(tmp_path / "export", checkpoint, tmp_path / "graph", "float32")
    onnx.save(model, tmp_path / "graph" / "model.onnx")
    assert len(fused) == 14 and {op.bits for op in fused} == {FORMATS.get(name).bits}
    seen, expected = outputs(tmp_path / "graph" / "model.onnx"), outputs(tmp_path / "expected" / "model.onnx")
    assert max(np.abs(a - b).max() for a, b in zip(seen, expected, strict=True)) < 1e-4


@pytest.mark.parametrize("name", ["int4-g32-asym", "fp8-dynamic", "w8a8-int8"])
def test_dequantized_graph_refuses_what_it_cannot_hold(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    checkpoint = quantized(tiny_llama, tmp_path / "checkpoint", name)
    export_model(tiny_llama, tmp_path / "export")
    (tmp_path / "graph").mkdir()
    with pytest.raises(UnsupportedError, match=f"is stored as {name}"):
        dequantized_graph(tmp_path / "export", checkpoint, tmp_path / "graph", "float32")


def test_packed_nibbles_puts_the_first_code_in_the_lower_half() -> None:
    assert packed_nibbles(np.array([[1, -1, 7], [-8, 0, 2]], np.int8)).tolist() == [0xF1, 0x87, 0x20]
    assert packed_nibbles(np.array([3, 4, 5], np.int8)).tolist() == [0x43, 0x05]


LISTED = (
    "Layers:\nName: q+k, LayerType: gemm, Inputs: [], Outputs: [], TacticName: t, StreamId: 0, "
    "Metadata: [ONNX Layer: q][ONNX Layer: k]\nName: call, LayerType: shape_call, Inputs: [], Metadata: \n"
    "Name: fc, LayerType: runtime_fusion, Inputs: [ { Name: x, Datatype: Half, Format: f }], Constants: [ { Name: c, "
    "Dimensions: [64,8], Datatype: Int4, Format: t }, { Name: s, Datatype: Half, Format: t }], Outputs: [ { Name: y, Datatype: "
    "Half, Format: f }], TacticName: , Metadata: [ONNX Layer: v/weight][ONNX Layer: v]\n"
    "Name: pick, LayerType: kgen, Inputs: [ { Name: i, Datatype: Int8, Format: f }], Constants: [ { Name: r, Datatype: Int64, "
    "Format: f }], Outputs: [ { Name: o, Datatype: Half, Format: f }], TacticName: , Metadata: [ONNX Layer: u]\n"
)


def test_layers_of_reads_the_builders_own_list() -> None:
    found = layers_of(("something else", LISTED))
    assert [(layer.name, layer.kind, layer.tensors, layer.bits) for layer in found] == [
        ("q+k", "gemm", ("q", "k"), None),
        ("call", "shape_call", (), None),
        ("fc", "runtime_fusion", ("v/weight", "v"), 4),
        ("pick", "kgen", ("u",), None),  # int8 arrives, none is held
    ]


def test_seen_integer_names_the_layer_that_holds_the_codes_and_none_where_they_were_unpacked() -> None:
    given = tuple(FusedOp(name=name, kind="DequantizeLinear", tensors=(), bits=4) for name in ("v", "q"))
    assert [op.executed_by for op in seen_integer(given, layers_of((LISTED,)))] == ["fc", None]


def test_last_phase_is_what_a_build_was_at() -> None:
    assert last_phase("phase: parse (1 steps) after 0.1 s\nnoise\nphase: tactics (9 steps) after 2.0 s\nnoise") == (
        "tactics (9 steps) after 2.0 s"
    )
    assert last_phase("killed") == "none"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Shared, so that the model is exported once."""
    return Store(tmp_path_factory.mktemp("tensorrt") / "store")


def request_for(source: Path, checkpoint: Path, recipe: WeightRecipe, gpu: str, store: Store) -> BuildRequest:
    config = CompileConfig(tensorrt_gpu=gpu, timeout_s=300)
    return BuildRequest(Tree.of(source), checkpoint, recipe, config, "test", store)


@pytest.mark.parametrize(("name", "gpu"), [(None, "sm89"), ("int4-g64", "sm120")])
def test_build_makes_engines_for_gpus_of_other_machines(
    tiny_llama: Path, tmp_path: Path, store: Store, name: str | None, gpu: str
) -> None:
    recipe = WeightRecipe() if name is None else WeightRecipe(method="rtn", formats=(name,))
    checkpoint = tiny_llama if name is None else quantized(tiny_llama, tmp_path / "checkpoint", name)
    (tmp_path / "work").mkdir()
    request = request_for(tiny_llama, checkpoint, recipe, gpu, store)
    (variant,) = TARGETS.get("tensorrt").variants(recipe)
    built = TARGETS.get("tensorrt").build(request, variant, tmp_path / "work")
    assert built.engine.num_bytes == (tmp_path / "work" / "engine" / "model.plan").stat().st_size > 10_000
    layout = Layout.model_validate_json((tmp_path / "work" / built.layout).read_bytes())
    read = {node for op in layout.fused if op.kind != "DequantizeLinear" for node in op.tensors}
    assert {f"model.layers.{index}.self_attn.{part}_proj" for index in range(2) for part in "qkvo"} <= read
    given = {op.name for op in layout.fused if op.kind == "DequantizeLinear"}
    assert len(given) == (0 if name is None else 14) and set(built.integer_layers or ()) == given
    log = (tmp_path / "work" / "build.log").read_text()
    took = build_time(log)
    assert PHASE in log and took is not None and took.cpu_seconds > 0 and 0 < took.seconds < 300
    per_profile = sum(layout.num_executed_ops.values()) / 2
    assert per_profile < sum(layout.num_ops.values()) / 2  # most nodes were fused
    assert sum(f"-{gpu}-" in timings.name for timings in (store.root / "timings").iterdir()) == 1


def test_build_refuses_a_gpu_that_the_library_does_not_know(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    request = request_for(tiny_llama, tiny_llama, WeightRecipe(), "sm90", Store(tmp_path / "store"))  # an H200
    words = (
        r"TensorRT-RTX 1\.\S+ does not build for sm90; it knows .*sm89.*; on H100, H200 and B200 install NVIDIA's own `tensorrt` "
        r"package and build there, or use `onnxruntime` with CUDA \(`pip install onnxruntime-gpu`\)"
    )
    with pytest.raises(UnsupportedError, match=words):
        TARGETS.get("tensorrt").build(request, TARGETS.get("tensorrt").variants(WeightRecipe())[0], tmp_path / "work")
    assert not list((tmp_path / "work").iterdir()) and not (tmp_path / "store").exists()


def test_build_plan_lets_later_versions_load_the_engine_and_refuses_what_the_library_forgets(
    tiny_llama: Path, tmp_path: Path
) -> None:
    export_model(tiny_llama, tmp_path, FORM)
    wanted = TensorRtBuild(profiles=shape_profiles(Sla(), Traffic())[1:], gpu="sm89", version_compatible=True)
    plan, log = build_plan(tmp_path / "model.onnx", wanted)
    assert len(plan) > 10_000 and layers_of(log)
    with pytest.raises(
        UnsupportedError, match=r"builds no engines that later GPUs load too; leave .* out and build one for each"
    ):
        build_plan(tmp_path / "model.onnx", wanted.model_copy(update={"hardware_compatible": True}))


def test_build_says_what_it_was_at_when_its_time_is_up(tiny_llama: Path, tmp_path: Path, store: Store) -> None:
    (tmp_path / "work").mkdir()
    request = request_for(tiny_llama, tiny_llama, WeightRecipe(), "sm89", store)
    exported(request, FORM)
    request = replace(request, config=request.config.model_copy(update={"timeout_s": 0.2}))
    with pytest.raises(CompileError, match=r"took longer than 0\.2 s; repeat it alone: .*; its last phase: none") as caught:
        TARGETS.get("tensorrt").build(request, TARGETS.get("tensorrt").variants(WeightRecipe())[0], tmp_path / "work")
    assert caught.value.reproduce.is_file()


def test_the_graph_for_tensorrt_has_an_explicit_cache_in_float16() -> None:
    assert FORM.explicit_cache and FORM.dtype == "float16"


def test_shape_profiles_follow_traffic_and_limits() -> None:
    traffic = Traffic(prompt_tokens=Lengths(p50=100, p95=200, max=300), output_tokens=Lengths(p50=40, p95=80, max=500))
    prefill, decode = shape_profiles(Sla(concurrency=16, max_model_len=4096), traffic)
    assert (prefill.batch.most, prefill.sequence, prefill.past) == (
        1,
        Range(least=1, usual=100, most=300),
        Range(least=0, usual=0, most=300),
    )
    assert decode.batch == Range(least=1, usual=8, most=16) and decode.sequence.most == 1
    assert decode.past == Range(least=1, usual=120, most=799)


def test_shape_profiles_hold_nothing_longer_than_the_model_length() -> None:
    prefill, decode = shape_profiles(Sla(max_model_len=64), Traffic())
    assert prefill.sequence.most == 64 and prefill.past.most == 63
    assert decode.past == Range(least=1, usual=63, most=63) and decode.batch == Range(least=1, usual=1, most=1)
