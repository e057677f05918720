"""Which layers are quantizable, tied together, and what does not fit, all known before any arithmetic."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BitNetConfig,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OpenAIGPTConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    T5Config,
)

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.quantization.layers import (
    LinearLayer,
    find_layers,
    fitting_formats,
    matching_layers,
    read_layers,
    read_plain_layers,
    require_fit,
    tie_groups,
    valid_groups,
    weight_reader,
)

LEAVES = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]


@pytest.mark.parametrize("tied", [True, False])
def test_read_layers_finds_all_linears_but_the_head(tied: bool, tmp_path: Path) -> None:
    layers = read_layers(write_tiny_llama(tmp_path / "m", tied=tied))
    assert [layer.name for layer in layers.linears] == [f"model.layers.{block}.{leaf}" for block in (0, 1) for leaf in LEAVES]
    assert sum(layer.num_weights for layer in layers.linears) == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    assert layers.kept["lm_head"] == "output head" and layers.kept["model.embed_tokens"] == "Embedding"


def test_tie_groups_joins_what_engines_fuse(tiny_llama: Path) -> None:
    groups = [[layer.name.rsplit(".", 1)[1] for layer in group] for group in tie_groups(read_layers(tiny_llama).linears)]
    assert groups == 2 * [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_tie_groups_accepts_a_block_without_v_proj() -> None:
    layers = tuple(LinearLayer(f"b.{leaf}", 8, 8) for leaf in ("q_proj", "k_proj"))
    assert tie_groups(layers) == (layers,)


def test_require_fit_names_layers_widths_and_valid_groups(tmp_path: Path) -> None:
    layers = read_layers(write_tiny_llama(tmp_path / "m", intermediate_size=80)).linears
    with pytest.raises(UnsupportedError) as caught:
        require_fit(layers, "int4-g32")
    message = str(caught.value)
    for block in (0, 1):
        assert f"model.layers.{block}.mlp.down_proj: in_features 80 is not divisible by group 32 (remainder 16)" in message
    assert "groups that divide every layer: 1, 2, 4, 8, 16;" in message
    assert valid_groups(layers) == (1, 2, 4, 8, 16)
    assert fitting_formats(layers) == ("int8-channel",)


def test_fitting_formats_leaves_out_groups_that_do_not_divide(tiny_llama: Path) -> None:
    found = fitting_formats(read_layers(tiny_llama).linears)
    assert {"int4-g32", "int4-g64", "int8-channel"} <= set(found) and "int4-g128" not in found


def test_matching_layers_matches_whole_name_parts(tiny_llama: Path) -> None:
    layers = read_layers(tiny_llama)
    assert matching_layers("layers.1", layers) == tuple(f"model.layers.1.{leaf}" for leaf in LEAVES)
    assert matching_layers("up_proj", layers) == ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert matching_layers("lm_head", layers) == ()
    with pytest.raises(ConfigError, match="'q_pro' matches no layer"):
        matching_layers("q_pro", layers)


def test_read_layers_covers_biased_attention(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    assert len(read_layers(tmp_path).linears) == 7


def test_read_layers_turns_conv1d_the_right_way_round(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)).save_pretrained(tmp_path)
    layers = read_layers(tmp_path)
    shapes = {layer.name.removeprefix("transformer.h.0."): (layer.out_features, layer.in_features) for layer in layers.linears}
    assert shapes == {"attn.c_attn": (96, 32), "attn.c_proj": (32, 32), "mlp.c_fc": (128, 32), "mlp.c_proj": (32, 128)}
    assert all(layer.transposed for layer in layers.linears) and layers.kept["lm_head"] == "output head"
    stored_IO = load_file(tmp_path / "model.safetensors")["transformer.h.0.attn.c_attn.weight"]
    assert torch.equal(weight_reader(tmp_path, layers.linears)("transformer.h.0.attn.c_attn"), stored_IO.T)


def test_read_layers_names_single_experts_as_the_checkpoint_does(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    with torch.random.fork_rng(devices=[]):
        MixtralForCausalLM(config).save_pretrained(tmp_path)
    layers = read_layers(tmp_path)
    experts = {layer.name: (layer.out_features, layer.in_features) for layer in layers.linears if ".experts." in layer.name}
    block = "model.layers.0.block_sparse_moe"
    sizes = {"w1": (48, 32), "w3": (48, 32), "w2": (32, 48)}
    assert experts == {f"{block}.experts.{number}.{leaf}": sizes[leaf] for number in range(4) for leaf in sizes}
    assert layers.routers == (f"{block}.gate",) and layers.kept[f"{block}.gate"] == "router over 4 experts"


UNCOVERED = {
    "mamba": (MambaConfig(num_hidden_layers=1), "model type 'mamba' is not covered; covered are gemma3_text, gpt2, llama"),
    "encoder-decoder": (T5Config(num_layers=1), "model type 't5' is not covered"),
    "another-moe": (Qwen2MoeConfig(num_hidden_layers=1), "model type 'qwen2_moe' is not covered"),
    "ternary": (BitNetConfig(num_hidden_layers=1), "model type 'bitnet' is not covered"),
    "vision": (Gemma3Config(), "model type 'gemma3' is not covered"),
}


@pytest.mark.parametrize("name", list(UNCOVERED))
def test_read_layers_refuses_uncovered_types_from_the_config_alone(name: str, tmp_path: Path) -> None:
    config, message = UNCOVERED[name]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        read_layers(tmp_path)


NOT_EVEN_PLAIN = {
    "encoder-decoder": (T5Config(num_layers=1), "model type 't5' is no causal language model"),
    "fused experts": (
        Qwen2MoeConfig(num_hidden_layers=1, num_experts=2, hidden_size=32, moe_intermediate_size=16, vocab_size=64),
        r"model\.layers\.0\.mlp\.experts\.gate_up_proj of model type 'qwen2_moe' holds fused experts \(2, 32, 32\)",
    ),
    "conv1d": (
        OpenAIGPTConfig(n_layer=1, n_embd=32, n_head=2, vocab_size=64),
        r"transformer\.h\.0\.attn\.c_attn of model type 'openai-gpt' is a Conv1D",
    ),
}


@pytest.mark.parametrize("name", list(NOT_EVEN_PLAIN))
def test_read_plain_layers_refuses_what_no_adaptor_takes(name: str, tmp_path: Path) -> None:
    config, message = NOT_EVEN_PLAIN[name]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        read_plain_layers(tmp_path)


@pytest.mark.parametrize("method", ["compressed-tensors", "bitnet", "gptq"])
def test_find_layers_refuses_a_model_that_is_quantized_already(method: str, tiny_llama: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(UnsupportedError, match=f"is quantized already \\({method}\\); give the full-precision model"):
        find_layers(tmp_path)


@pytest.fixture
def sharded(tiny_llama: Path, tmp_path: Path) -> Path:
    load_dequantized(tiny_llama).save_pretrained(tmp_path / "m", max_shard_size="150KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    return tmp_path / "m"


def lose_shard(directory: Path, index: dict[str, dict[str, str]]) -> str:
    name = sorted(set(index["weight_map"].values()))[1]
    (directory / name).unlink()
    return f"names {name}, which is absent"


def lose_entry(directory: Path, index: dict[str, dict[str, str]]) -> str:
    del index["weight_map"]["model.norm.weight"]
    return r"model\.norm\.weight: absent from the index"


def misplace(directory: Path, index: dict[str, dict[str, str]]) -> str:
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(it for it in files if it != index["weight_map"]["model.norm.weight"])
    return r"model\.norm\.weight: in another shard than stated"


def misstate(directory: Path, index: dict[str, dict[str, str]]) -> str:
    stored = sum(header.num_bytes for header in read_headers(directory).values())
    index["metadata"]["total_size"] = 1  # type: ignore[assignment]
    return f"states total_size 1, the shards hold {stored} bytes"


# QA-047: the index is checked both ways before anything is computed.
@pytest.mark.parametrize("damage", [lose_shard, lose_entry, misplace, misstate])
def test_read_layers_refuses_shards_that_are_not_what_their_index_says(
    damage: Callable[[Path, dict[str, dict[str, str]]], str], sharded: Path
) -> None:
    assert len(read_layers(sharded).linears) == 14
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    message = damage(sharded, index)
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        read_layers(sharded)


# QA-007: a 128 x 128 matrix at 4 bits with float16 scales, and with zero points of 4 bits.
@pytest.mark.parametrize(
    ("format_name", "bits"),
    [
        ("int4-g32", 4.5),
        ("int4-g64", 4.25),
        ("int4-g128", 4.125),
        ("int4-g32-asym", 4.625),
        ("int4-g64-asym", 4.3125),
        ("int4-g128-asym", 4.15625),
    ],
)
def test_num_bytes_counts_scales_and_zero_points(format_name: str, bits: float) -> None:
    assert 8 * FORMATS.get(format_name).num_bytes(128, 128) / 128**2 == bits
