"""The drawn ONNX graph against transformers, and integer weights against their checkpoint."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import (
    DynamicCache,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from model_optimizer.compilation.export import export_model
from model_optimizer.compilation.external_data import ALIGNMENT, MODEL, read_array
from model_optimizer.compilation.swap import pack_blocks, swap_weights
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor

SIZES = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama-biased": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=32)),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
}


def save(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Give norms and biases values of their own, so that leaving one out is seen."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return model.eval()


def run(session: onnxruntime.InferenceSession, ids: np.ndarray, mask: np.ndarray, past: list[np.ndarray]) -> list[np.ndarray]:
    positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
    names = [value.name for value in session.get_inputs() if value.name.startswith("past")]
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **dict(zip(names, past, strict=True))}
    return session.run(None, feeds)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    root = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = save(FAMILIES[request.param](), root / "model")
    export_model(root / "model", root / "onnx")
    return model, root / "onnx"


@pytest.mark.parametrize(("batch", "num_past", "num_new"), [(1, 0, 1), (1, 0, 7), (2, 5, 1), (3, 17, 1), (2, 5, 4)])
def test_export_matches_transformers(exported: tuple[PreTrainedModel, Path], batch: int, num_past: int, num_new: int) -> None:
    model, directory = exported
    ids = torch.randint(1, 120, (batch, num_past + num_new), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache()
    with torch.inference_mode():
        if num_past:
            model(ids[:, :num_past], past_key_values=cache)
        empty = np.zeros((batch, 2, 0, model.config.to_dict().get("head_dim") or 16), np.float32)
        layers = [(layer.keys.numpy(), layer.values.numpy()) for layer in cache.layers] if num_past else [(empty, empty)] * 2
        past = [part.copy() for layer in layers for part in layer]
        expected = model(ids[:, num_past:], past_key_values=cache).logits.numpy()
    session = onnxruntime.InferenceSession(directory / MODEL)
    logits, *present = run(session, ids[:, num_past:].numpy(), np.ones(ids.shape, np.int64), past)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_allclose(present[0], cache.layers[0].keys.numpy(), atol=1e-4)


def test_export_hides_left_padding(exported: tuple[PreTrainedModel, Path]) -> None:
    model, directory = exported
    ids = np.array([[0, 0, 0, 11, 12], [21, 22, 23, 24, 25]])
    past = [np.zeros((2, 2, 0, model.config.to_dict().get("head_dim") or 16), np.float32)] * 4
    session = onnxruntime.InferenceSession(directory / MODEL)
    logits = run(session, ids, np.array([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]), past)[0]
    with torch.inference_mode():
        alone = model(torch.tensor([[11, 12]])).logits[0].numpy()
    np.testing.assert_allclose(logits[0, 3:], alone, atol=1e-4)
    assert np.isfinite(logits).all()


def test_export_stores_each_tensor_once_and_aligned(exported: tuple[PreTrainedModel, Path]) -> None:
    model, directory = exported
    weights = sum(parameter.nbytes for parameter in model.parameters())
    graph = onnx.load(directory / MODEL, load_external_data=False)
    assert weights <= (directory / f"{MODEL}.data").stat().st_size <= weights + ALIGNMENT * len(graph.graph.initializer)
    named = {tensor.name: tensor for tensor in graph.graph.initializer}
    expected = model.model.layers[1].mlp.down_proj.weight.detach().numpy().T
    np.testing.assert_array_equal(read_array(named["model.layers.1.mlp.down_proj.weight"], directory), expected)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)), "attention slides over 16 tokens"),
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")), "activation 'gelu' is not silu"),
        (
            lambda: GPTNeoXForCausalLM(
                GPTNeoXConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
            ),
            "model type 'gpt_neox' is not one of llama",
        ),
    ],
)
def test_export_refuses_what_it_cannot_draw(model: object, reason: str, tmp_path: Path) -> None:
    save(model(), tmp_path / "model")  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match=reason):
        export_model(tmp_path / "model", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize(("bits", "num_groups"), [(4, 3), (8, 1), (4, 1), (8, 6), (2, 3), (3, 3), (2, 1)])
def test_pack_blocks_keeps_every_value(bits: int, num_groups: int) -> None:
    generator = np.random.default_rng(0)
    codes = generator.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 192)).astype(np.int8)
    scales = generator.random((5, num_groups), np.float32)
    packed = pack_blocks(codes, scales, bits, 16)
    raw = packed.blocks_ONB.astype(np.int32)
    assert packed.bits == {2: 2, 3: 4, 4: 4, 8: 8}[bits]  # the engine has no 3-bit kernel
    if bits == 2:
        raw = np.stack([raw & 3, raw >> 2 & 3, raw >> 4 & 3, raw >> 6], -1).reshape(5, -1, packed.block_size)
    elif bits < 8:
        raw = np.stack([raw & 15, raw >> 4], -1).reshape(5, -1, packed.block_size)
    restored = (raw - 2 ** (packed.bits - 1)) * packed.scales_ON[..., None]
    np.testing.assert_allclose(restored.reshape(5, 192), codes * np.repeat(scales, 192 // num_groups, 1))


@pytest.mark.parametrize("num_groups", [3, 6])  # odd numbers of blocks fill half a byte
def test_pack_blocks_packs_zero_points_as_codes(num_groups: int) -> None:
    generator = np.random.default_rng(1)
    zeros = generator.integers(-8, 8, (5, num_groups)).astype(np.int8)
    packed = pack_blocks(np.zeros((5, 32 * num_groups), np.int8), np.ones((5, num_groups), np.float32), 4, 32, zeros)
    assert packed.zeros_ON is not None and packed.zeros_ON.shape == (5, (num_groups + 1) // 2)
    raw = np.stack([packed.zeros_ON & 15, packed.zeros_ON >> 4], -1).reshape(5, -1)[:, :num_groups].astype(np.int32) - 8
    np.testing.assert_array_equal(raw, zeros)


def test_swap_refuses_a_layer_whose_inputs_are_rounded(tiny_llama: Path, tmp_path: Path) -> None:
    headers, layer = read_headers(tiny_llama), "model.layers.0.mlp.up_proj"
    weight_OI = read_tensor(headers[f"{layer}.weight"]).float()
    write_checkpoint(tiny_llama, tmp_path / "q", {layer: "w8a8-int8"}, lambda _: FORMATS.get("w8a8-int8").quantize(weight_OI))
    export_model(tiny_llama, tmp_path / "export")
    (tmp_path / "engine").mkdir()
    with pytest.raises(UnsupportedError, match=r"up_proj is stored as w8a8-int8, whose rounding of inputs onnxruntime"):
        swap_weights(tmp_path / "export", tmp_path / "q", tmp_path / "engine", accuracy_level=1, block_size=32)


@torch.inference_mode()
def test_swap_keeps_zero_points_beside_int8_activations(tiny_llama: Path, tmp_path: Path) -> None:
    headers = read_headers(tiny_llama)
    layers = [name.removesuffix(".weight") for name in headers if "_proj" in name]
    number = FORMATS.get("int4-g64-asym")
    write_checkpoint(
        tiny_llama,
        tmp_path / "packed",
        dict.fromkeys(layers, number.name),
        lambda layer: number.quantize(read_tensor(headers[f"{layer}.weight"]).float()),
    )
    export_model(tiny_llama, tmp_path / "export")
    (tmp_path / "engine").mkdir()
    model, _ = swap_weights(tmp_path / "export", tmp_path / "packed", tmp_path / "engine", accuracy_level=4, block_size=32)
    onnx.save(model, tmp_path / "engine" / MODEL)
    ids = np.arange(20, 60)[None]
    session = onnxruntime.InferenceSession(tmp_path / "engine" / MODEL)
    logits = run(session, ids, np.ones_like(ids), [np.zeros((1, 2, 0, 16), np.float32)] * 4)[0]
    expected = load_dequantized(tmp_path / "packed")(torch.from_numpy(ids)).logits.numpy()
    error_ratio = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 0 < error_ratio < 0.1  # rounding of activations; zero points that are lost cost as much as the weights themselves


def test_pack_blocks_fills_a_last_partial_block_with_zero() -> None:
    packed = pack_blocks(np.full((2, 70), 3, np.int8), np.ones((2, 1), np.float32), 8, 32)
    assert packed.blocks_ONB.shape == (2, 3, 32)
    assert (packed.blocks_ONB[:, 2, 6:] == 128).all()


def test_pack_blocks_refuses_a_group_the_kernel_does_not_know() -> None:
    with pytest.raises(UnsupportedError, match="not 48"):
        pack_blocks(np.zeros((2, 96), np.int8), np.ones((2, 2), np.float32), 4, 64)


@pytest.mark.parametrize(
    "plan",
    [
        ("int8-channel",),
        ("int4-g64",),
        ("int3-g32",),
        ("int2-g64",),
        ("int4-g32-asym",),
        ("int8-channel", "int4-g64"),
        ("int2-g64", "int4-g32", "int8-channel", "float32", "int3-g64", "int2-g32", "int4-g64-asym"),
    ],
)
def test_swap_computes_what_the_checkpoint_computes(plan: tuple[str, ...], tiny_llama: Path, tmp_path: Path) -> None:
    headers = read_headers(tiny_llama)
    layers = [name.removesuffix(".weight") for name in headers if "_proj" in name]
    formats = {layer: plan[index % len(plan)] for index, layer in enumerate(layers)}
    packed = [layer for layer in layers if formats[layer] != "float32"]
    write_checkpoint(
        tiny_llama,
        tmp_path / "packed",
        formats,
        lambda layer: FORMATS.get(formats[layer]).quantize(read_tensor(headers[f"{layer}.weight"]).float()),
    )
    export_model(tiny_llama, tmp_path / "export")
    (tmp_path / "engine").mkdir()
    model, fused = swap_weights(tmp_path / "export", tmp_path / "packed", tmp_path / "engine", accuracy_level=1, block_size=32)
    onnx.save(model, tmp_path / "engine" / MODEL)
    held = {"2": 2, "3": 4, "4": 4, "8": 8}
    assert {op.name: op.bits for op in fused} == {layer: held[formats[layer][3]] for layer in packed}
    kinds = {node.name: node.op_type for node in model.graph.node}
    assert {kinds[layer] for layer in packed} == {"MatMulNBits"}
    assert all(kinds[layer] == "MatMul" for layer in layers if layer not in packed)
    ids = np.arange(20, 60)[None]
    session = onnxruntime.InferenceSession(tmp_path / "engine" / MODEL)
    logits = run(session, ids, np.ones_like(ids), [np.zeros((1, 2, 0, 16), np.float32)] * 4)[0]
    with torch.inference_mode():
        expected = load_dequantized(tmp_path / "packed")(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    assert (tmp_path / "engine" / f"{MODEL}.data").stat().st_size < (tmp_path / "export" / f"{MODEL}.data").stat().st_size
