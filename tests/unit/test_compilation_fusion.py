"""Fused graphs against the plain one: the same logits over prompts, caches of unequal rows and every family."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from test_compilation_onnx import FAMILIES, save

from model_optimizer.compilation.export import export_model
from model_optimizer.compilation.external_data import MODEL
from model_optimizer.compilation.fusion import FUSIONS, fuse, fusions_of
from model_optimizer.compilation.fusion_head import rounded_rows
from model_optimizer.compilation.swap import swap_weights
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.runtimes.backends.onnxruntime import open_model, open_session
from model_optimizer.runtimes.decoder_model import ModelInput
from model_optimizer.runtimes.ort_models import CACHE, IN_PLACE, MAX_POSITION, InPlaceOrtModel

QUANTIZED = ("llama-tied", "qwen3")
PROMPTS = ([3, 4, 5, 6, 7, 8, 9], [11], [21, 22, 23])


@pytest.fixture(scope="module", params=["llama-tied", "llama-biased", "llama3-rope", "qwen3"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, onnx.ModelProto]:
    """A checkpoint, plain or with weights of 4 bits, and its graph with all fusions of level 2."""
    root = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        save(FAMILIES[request.param](), root / "model")
    export_model(root / "model", root / "onnx")
    (root / "plain").mkdir()
    (root / "fused").mkdir()
    if request.param in QUANTIZED:
        headers = read_headers(root / "model")
        layers = [name.removesuffix(".weight") for name in headers if "_proj.weight" in name]
        plan = dict.fromkeys(layers, "int4-g32-asym")
        number = FORMATS.get("int4-g32-asym")
        write_checkpoint(
            root / "model", root / "packed", plan, lambda name: number.quantize(read_tensor(headers[f"{name}.weight"]).float())
        )
        plain, _ = swap_weights(root / "onnx", root / "packed", root / "plain", accuracy_level=1, block_size=32)
    else:
        (root / "plain" / f"{MODEL}.data").symlink_to(root / "onnx" / f"{MODEL}.data")
        (root / "packed").symlink_to(root / "model")
        plain = onnx.load(root / "onnx" / MODEL, load_external_data=False)
    fused, counts = fuse(plain, root / "plain", fusions_of(2, quantized=True), root / "fused")
    onnx.save(fused, root / "fused" / MODEL)
    merged = 2 if request.param == "llama-tied" else 0  # norms of heads and biases stand between, plain weights stay apart
    gated = 2 if request.param in QUANTIZED else 0
    assert counts == {"group_query_attention": 2, "merged_projections": merged, "merged_gate_up": gated, "skip_norm": 4}
    return request.param, root, fused


def expected_logits(root: Path, tokens: list[int]) -> NDArray[np.float32]:
    with torch.inference_mode():
        return load_dequantized(root / "packed")(torch.tensor([tokens])).logits[0].float().numpy()


def test_fused_graph_decodes_rows_of_unequal_length_like_the_checkpoint(engines: tuple[str, Path, onnx.ModelProto]) -> None:
    _, root, _ = engines
    model = InPlaceOrtModel(open_session(root / "fused" / MODEL, 1), 0, page_tokens=4)
    caches, rows = [], [list(prompt) for prompt in PROMPTS]
    for prompt in rows:
        ids = np.array([prompt])
        logits, cache = model.forward(ModelInput(ids, np.ones_like(ids), np.arange(len(prompt))[None]), None)
        np.testing.assert_allclose(logits[0], expected_logits(root, prompt), atol=2e-4)
        caches.append(cache)
    joined = model.join(caches)
    for step in range(6):  # goes over the ends of pages of 4
        new = np.array([[30 + step], [40 + step], [50 + step]])
        lengths = np.array([[len(row)] for row in rows])
        width = int(lengths.max()) + 1
        mask = (np.arange(width) >= width - 1 - lengths).astype(np.int64)
        logits, joined = model.forward(ModelInput(new, mask, lengths), joined)
        for row, token in zip(rows, new[:, 0].tolist(), strict=True):
            row.append(token)
    for at, row in enumerate(rows):
        np.testing.assert_allclose(logits[at, 0], expected_logits(root, row)[-1], atol=3e-4)
    kept = model.select(joined, [2, 0], 0)
    assert kept.lengths == (9, 13) and kept.room == 16
    assert model.cache_bytes(kept) == 2 * 2 * 2 * 2 * 16 * kept.parts[0].shape()[3] * 4  # layers, key and value, rows, heads
    logits, _ = model.forward(ModelInput(np.array([[7], [8]]), np.ones((2, 14), np.int64), np.array([[9], [13]])), kept)
    np.testing.assert_allclose(logits[1, 0], expected_logits(root, [*rows[0], 8])[-1], atol=3e-4)


def test_fused_graph_continues_a_prompt_in_pieces(engines: tuple[str, Path, onnx.ModelProto]) -> None:
    _, root, _ = engines
    model, _ = open_model(root / "fused")
    tokens = np.arange(5, 45)[None]
    _, cache = model.forward(ModelInput(tokens[:, :21], np.ones((1, 21), np.int64), np.arange(21)[None], 20), None)
    logits, _ = model.forward(ModelInput(tokens[:, 21:], np.ones((1, 40), np.int64), np.arange(21, 40)[None], 17), cache)
    assert logits.shape == (1, 2, 120)
    np.testing.assert_allclose(logits[0], expected_logits(root, tokens[0].tolist())[-2:], atol=3e-4)


def test_fuse_leaves_nothing_unread_and_says_how_the_cache_is_kept(engines: tuple[str, Path, onnx.ModelProto]) -> None:
    name, root, fused = engines
    kinds = [node.op_type for node in fused.graph.node]
    assert not {"Attention", "RotaryEmbedding", "Where", "Cos"} & set(kinds)
    assert kinds.count("SkipSimplifiedLayerNormalization") == 4
    assert kinds.count("MatMulNBits") == {"llama-tied": 2 * 4, "qwen3": 2 * 6}.get(name, 0)
    read = {value for node in fused.graph.node for value in node.input}
    assert {tensor.name for tensor in fused.graph.initializer} <= read
    properties = {entry.key: entry.value for entry in fused.metadata_props}
    assert (properties[CACHE], properties[MAX_POSITION]) == (IN_PLACE, "128")
    plain = (root / "plain" / f"{MODEL}.data").stat().st_size
    assert (root / "fused" / f"{MODEL}.data").stat().st_size < plain + 2 * 128 * 16 * 4 + 4096 * len(fused.graph.initializer)


def test_fusions_of_keeps_the_head_unless_weights_are_rounded_too() -> None:
    assert fusions_of(1, quantized=True) == ()
    assert [fusion.name for fusion in fusions_of(3, quantized=False)] == [fusion.name for fusion in fusions_of(2, quantized=True)]
    assert fusions_of(3, quantized=True) == FUSIONS and FUSIONS[-1].name == "int8_head"


def test_rounded_rows_are_within_half_a_step() -> None:
    weight = np.random.default_rng(0).normal(size=(5, 70)).astype(np.float32)
    weight[2] = 0
    rounded = rounded_rows(weight)
    values = (rounded.blocks_ONB.astype(np.float32) - 128) * rounded.scales_ON[..., None]
    steps = np.repeat(rounded.scales_ON, 32, axis=1)[:, :70]
    assert rounded.blocks_ONB.shape == (5, 3, 32) and (values.reshape(5, -1)[:, 70:] == 0).all()
    assert (np.abs(values.reshape(5, -1)[:, :70] - weight) <= steps / 2 * 1.0001).all()
    np.testing.assert_allclose(rounded.scales_ON[0, 0], np.abs(weight[0, :32]).max() / 127)
