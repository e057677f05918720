"""ONNX Runtime engines for a GPU: what can be told without one. The graphs run on the CPU through the same bindings."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from test_compilation_onnx import FAMILIES, save

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.export import export_model
from model_optimizer.compilation.external_data import MODEL
from model_optimizer.compilation.fusion import Fusion, fuse, fusions_of
from model_optimizer.compilation.fusion_cuda import form_on_cuda, place_on_cuda
from model_optimizer.compilation.registry import TARGETS, BuildRequest
from model_optimizer.compilation.swap import swap_weights
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.runtimes.backends.onnxruntime import OnnxRuntimeFactory, distribution, open_session, require_device
from model_optimizer.runtimes.decoder_model import ModelInput
from model_optimizer.runtimes.ort_models import CPU, CUDA, CUDA_COLUMNS, DEVICE, BoundOrtModel, Buffers, InPlaceOrtModel
from model_optimizer.runtimes.ort_replay import ReplayedOrtModel
from model_optimizer.runtimes.registry import framework_version
from model_optimizer.store import Store

PLAN = KvPlan(page_tokens=16, num_pages=16, bytes_per_token=1, max_batch=2, max_model_len=64)
ON_CUDA = Fusion("on_cuda", 0, place_on_cuda)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and the same with weights of 4 bits in `packed`."""
    root = tmp_path_factory.mktemp("cuda")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        save(FAMILIES["llama-tied"](), root / "model")
    headers, number = read_headers(root / "model"), FORMATS.get("int4-g32")
    plan = {name.removesuffix(".weight"): "int4-g32" for name in headers if "_proj.weight" in name}
    write_checkpoint(
        root / "model", root / "packed", plan, lambda name: number.quantize(read_tensor(headers[f"{name}.weight"]).float())
    )
    return root


def engine_of(source: Path, level: int, name: str) -> Path:
    """Draw, swap and fuse as a build for a GPU does; return the engine's folder."""
    target, made = source / f"{name}-{level}", source / f"{name}-{level}-plain"
    if target.exists():
        return target
    target.mkdir()
    made.mkdir()
    export_model(source / "model", source / f"export-{name}-{level}", form_on_cuda(level))
    if name == "packed":
        plain, _ = swap_weights(source / f"export-{name}-{level}", source / "packed", made, accuracy_level=0, block_size=64)
    else:
        (made / f"{MODEL}.data").symlink_to(source / f"export-{name}-{level}" / f"{MODEL}.data")
        plain = onnx.load(source / f"export-{name}-{level}" / MODEL, load_external_data=False)
    fused, _ = fuse(plain, made, (*fusions_of(level, quantized=name == "packed"), ON_CUDA), target)
    onnx.save(fused, target / MODEL)
    return target


def expected_logits(source: Path, name: str, tokens: list[int]) -> NDArray[np.float32]:
    with torch.inference_mode():
        return load_dequantized(source / name)(torch.tensor([tokens])).logits[0].float().numpy()


@pytest.mark.parametrize(("name", "limit"), [("model", 0.02), ("packed", 0.02)])
def test_fused_float16_graph_decodes_like_the_checkpoint(source: Path, name: str, limit: float) -> None:
    folder = engine_of(source, 2, name)
    model = InPlaceOrtModel(open_session(folder / MODEL, 1), 0, 16, CPU)
    rows = [[3, 4, 5, 6, 7, 8, 9], [11, 12]]
    caches = []
    for row in rows:
        ids = np.array([row])
        logits, cache = model.forward(ModelInput(ids, np.ones_like(ids), np.arange(len(row))[None]), None)
        np.testing.assert_allclose(logits[0], expected_logits(source, name, row), atol=limit)
        caches.append(cache)
    joined = model.join(caches)
    assert model.cache_bytes(joined) == 2 * 2 * 2 * 2 * 16 * joined.parts[0].shape()[3] * 2  # float16
    new, lengths = np.array([[30], [40]]), np.array([[7], [2]])
    mask = (np.arange(8) >= 7 - lengths).astype(np.int64)
    logits, joined = model.forward(ModelInput(new, mask, lengths), joined)
    for at, row in enumerate(rows):
        np.testing.assert_allclose(logits[at, 0], expected_logits(source, name, [*row, int(new[at, 0])])[-1], atol=limit)


def test_replayed_model_computes_what_the_other_does_while_rows_join_and_leave(source: Path) -> None:
    session = open_session(engine_of(source, 2, "packed") / MODEL, 1)
    found = []
    for model in (ReplayedOrtModel(session, 0, 16, CPU), InPlaceOrtModel(session, 0, 16, CPU)):
        seen, caches, lengths = [], [], [14, 3]
        for length in lengths:
            ids = np.arange(5, 5 + length)[None]
            caches.append(model.forward(ModelInput(ids, np.ones_like(ids), np.arange(length)[None], length - 1), None)[1])
        joined = model.join(caches)
        for step in range(4):  # goes over the end of a page
            row_B1 = np.array(lengths)[:, None]
            mask = (np.arange(max(lengths) + 1) >= max(lengths) - row_B1).astype(np.int64)
            logits, joined = model.forward(ModelInput(np.array([[7 + step], [9]]), mask, row_B1), joined)
            seen.append(logits.copy())
            lengths = [length + 1 for length in lengths]
        alone, alone_too = model.select(joined, [1], 0), model.select(joined, [1], 0)
        for token in (4, 90):  # two caches of one shape are alive at once
            new = np.array([[token]])
            logits, alone = model.forward(ModelInput(new, np.ones((1, len(seen) + 4), np.int64), new), alone)
            seen.append(logits.copy())
            logits, alone_too = model.forward(ModelInput(new + 1, np.ones((1, len(seen) + 4), np.int64), new), alone_too)
            seen.append(logits.copy())
        found.append(seen)
    for replayed, launched in zip(*found, strict=True):
        np.testing.assert_array_equal(replayed, launched)


def test_replayed_model_keeps_the_place_of_a_cache_that_goes_on_in_pieces(source: Path) -> None:
    session, found = open_session(engine_of(source, 2, "packed") / MODEL, 1), []
    for model in (ReplayedOrtModel(session, 0, 16, CPU), InPlaceOrtModel(session, 0, 16, CPU)):
        caches: list[Buffers | None] = [None, None]
        for at, first, count in ((0, 0, 3), (1, 0, 3), (0, 3, 1), (0, 4, 2), (1, 3, 1), (0, 6, 1)):
            ids = np.arange(first, first + count)[None] + 50 * at
            mask = np.ones((1, first + count), np.int64)
            logits, caches[at] = model.forward(ModelInput(ids, mask, np.arange(first, first + count)[None]), caches[at])
        found.append(logits.copy())
    np.testing.assert_array_equal(*found)


def test_replayed_model_gives_places_of_dead_caches_to_others(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_optimizer.runtimes.ort_replay.MOST_RECORDINGS", 2)
    model = ReplayedOrtModel(open_session(engine_of(source, 2, "packed") / MODEL, 1), 0, 16, CPU)
    ids, one = np.array([[5, 6, 7]]), np.ones((1, 1), np.int64)
    kept = []
    for _ in range(4):
        _, cache = model.forward(ModelInput(ids, np.ones_like(ids), np.arange(3)[None]), None)
        _, cache = model.forward(ModelInput(one, np.ones((1, 4), np.int64), 3 * one), cache)
        kept = [*kept, cache][-2:]
    assert len({id(cache.parts) for cache in kept}) == 2 and len(model._recordings) <= 3


def test_place_on_cuda_leaves_one_float_type_beside_codes(source: Path) -> None:
    model = onnx.load(engine_of(source, 3, "packed") / MODEL, load_external_data=False)
    kinds = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    assert set(kinds.values()) == {"FLOAT16", "UINT8", "INT64"}
    assert {kinds[name] for name in ("/cos_table", "/sin_table", "lm_head.weight_scales")} == {"FLOAT16"}
    assert not [value.name for value in model.graph.input if value.name in kinds]  # no input has a default
    assert all(len(node.input) == 9 for node in model.graph.node if node.op_type == "GroupQueryAttention")
    assert {entry.key: entry.value for entry in model.metadata_props}[DEVICE] == CUDA


def test_bound_model_keeps_a_growing_cache_like_the_checkpoint(source: Path) -> None:
    model = BoundOrtModel(open_session(engine_of(source, 1, "packed") / MODEL, 1), 0, CPU)
    ids = np.array([[5, 6, 7, 8]])
    _, cache = model.forward(ModelInput(ids[:, :3], np.ones((1, 3), np.int64), np.arange(3)[None], 2), None)
    assert cache[0].shape()[2] == 3 and model.cache_bytes(cache) == 4 * 2 * 3 * cache[0].shape()[3] * 4
    logits, cache = model.forward(ModelInput(ids[:, 3:], np.ones((1, 4), np.int64), np.array([[3]])), cache)
    np.testing.assert_allclose(logits[0, 0], expected_logits(source, "packed", ids[0].tolist())[-1], atol=2e-4)
    assert [part.shape()[2] for part in model.select(cache, [0], 1)] == [3] * len(cache)


def test_cache_on_a_gpu_grows_by_many_columns(source: Path) -> None:
    session = open_session(engine_of(source, 2, "packed") / MODEL, 1)
    assert InPlaceOrtModel(session, 0, 48, CUDA)._rounded(1) == 288
    assert CUDA_COLUMNS == 256 and InPlaceOrtModel(session, 0, 48, CPU)._rounded(1) == 48


def test_build_for_cuda_is_refused_by_name_where_onnxruntime_has_only_the_cpu(source: Path, tmp_path: Path) -> None:
    config = CompileConfig(level=2, onnxruntime_device="cuda")
    request = BuildRequest(Tree.of(source / "model"), source / "model", WeightRecipe(), config, "t", Store(tmp_path / "store"))
    target = TARGETS.get("onnxruntime")
    message = r"has no CUDAExecutionProvider .*CPUExecutionProvider.*`pip install onnxruntime-gpu`"
    with pytest.raises(UnsupportedError, match=message):
        target.build(request, target.variants(WeightRecipe())[0], tmp_path)
    assert not list(tmp_path.iterdir())
    require_device(CPU)


def test_open_refuses_an_engine_for_cuda_by_name_where_onnxruntime_has_only_the_cpu(source: Path) -> None:
    version = framework_version(distribution())
    folder = engine_of(source, 0, "model")
    engine = Engine(runtime="onnxruntime", directory=".", num_bytes=1, framework_version=version)
    with pytest.raises(UnsupportedError, match="engines for cuda need; run `pip uninstall onnxruntime`"):
        OnnxRuntimeFactory().open(engine, folder, PLAN)
