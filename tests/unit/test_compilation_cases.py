"""QA-057: the cache axes of an exported decoder, on the model that the case names."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from model_optimizer.compilation.export import export_model

KV_HEADS, HEAD_DIM = 2, 16


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def graph(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qa057")
    model.save_pretrained(folder / "model")
    export_model(folder / "model", folder / "onnx")
    return folder / "onnx" / "model.onnx"


def axes(value: onnx.ValueInfoProto) -> tuple[str | int, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def test_cache_axes_have_kv_heads_and_names_of_their_own(graph: Path) -> None:
    drawn = onnx.load(graph, load_external_data=False).graph
    inputs, outputs = ({it.name: axes(it) for it in values} for values in (drawn.input, drawn.output))
    past = [shape for name, shape in inputs.items() if name.startswith("past_key_values.")]
    present = [shape for name, shape in outputs.items() if name.startswith("present.")]
    assert past == [("batch", KV_HEADS, "past", HEAD_DIM)] * 4
    assert present == [("batch", KV_HEADS, "total", HEAD_DIM)] * 4
    assert inputs["attention_mask"] == ("batch", "total") and inputs["input_ids"] == ("batch", "sequence")


@pytest.mark.parametrize(("batch", "num_past", "num_new"), [(1, 0, 1), (1, 0, 7), (2, 5, 1), (3, 17, 1)])
def test_every_batch_and_length_runs_and_matches_torch(
    model: LlamaForCausalLM, graph: Path, batch: int, num_past: int, num_new: int
) -> None:
    tokens_BT = torch.randint(0, 256, (batch, num_past + num_new), generator=torch.Generator().manual_seed(num_past))
    cache = DynamicCache()
    with torch.no_grad():
        if num_past:
            model(tokens_BT[:, :num_past], past_key_values=cache)
        past = [np.zeros((batch, KV_HEADS, 0, HEAD_DIM), np.float32)] * 4
        if num_past:
            past = [part.numpy().copy() for layer in cache.layers for part in (layer.keys, layer.values)]
        expected_BSV = model(tokens_BT[:, num_past:], past_key_values=cache).logits.numpy()
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    names = [it.name for it in session.get_inputs() if it.name.startswith("past_key_values.")]
    feeds = {
        "input_ids": tokens_BT[:, num_past:].numpy(),
        "attention_mask": np.ones((batch, num_past + num_new), np.int64),
        "position_ids": np.tile(np.arange(num_past, num_past + num_new), (batch, 1)),
        **dict(zip(names, past, strict=True)),
    }
    logits_BSV, *present = session.run(None, feeds)
    assert np.abs(logits_BSV - expected_BSV).max() < 1e-4
    assert {part.shape for part in present} == {(batch, KV_HEADS, num_past + num_new, HEAD_DIM)}
