"""Which layers are quantizable, tied together, and what does not fit, all known before any arithmetic."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.quantization.layers import (
    LinearLayer,
    fitting_formats,
    matching_layers,
    read_layers,
    require_fit,
    tie_groups,
    valid_groups,
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


def test_read_layers_refuses_conv1d_by_name(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"transformer\.h\.0\.attn\.c_attn is a Conv1D"):
        read_layers(tmp_path)


def test_read_layers_refuses_fused_experts_by_name(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    with torch.random.fork_rng(devices=[]):
        MixtralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mlp\.experts\.\w+ holds fused experts"):
        read_layers(tmp_path)
