"""Dimensions, sizes and cache bytes from config and headers (QA-036, QA-037, X15, X22)."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.models.facts import read_facts
from model_optimizer.models.shape import kv_layers, read_shape

LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_3_8B = LLAMA | {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip


def kv_bytes(config: dict[str, object], value_bytes: int = 2) -> int:
    return sum(layer.bytes_per_token for layer in kv_layers(read_shape(config), value_bytes))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 256),
        (LLAMA | {"head_dim": 32}, 512),
        (LLAMA | {"head_dim": None}, 256),
        (LLAMA | {"model_type": "qwen3", "head_dim": 32}, 512),
        ({name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}, 512),
        (LLAMA | {"num_key_value_heads": None}, 512),
        ({"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}, 512),
        (
            {
                "model_type": "falcon", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "multi_query": True, "new_decoder_architecture": False,
            },
            128,
        ),
        (LLAMA_3_8B, 131_072),
        (LLAMA_3_8B | {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}, 327_680),
        (LLAMA_3_8B | {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
                       "num_key_value_heads": 4}, 57_344),
        ({"n_layer": 2, "d_model": 64, "n_heads": 4, "vocab_size": 256}, 512),
    ],
    ids=["gqa", "head-dim", "head-dim-null", "qwen3", "kv-absent", "kv-null", "gpt2", "falcon", "llama-3-8b", "llama-3-70b",
         "qwen2-7b", "unknown-type"],
)  # fmt: skip
def test_kv_layers_bytes_per_token_in_float16(config: dict[str, object], expected: int) -> None:
    assert kv_bytes(config) == expected


def test_kv_layers_pool_of_one_mib_holds_2048_tokens() -> None:
    block_bytes = 16 * kv_bytes(LLAMA | {"head_dim": 32})
    assert block_bytes == 8192
    assert (2**20 // block_bytes, 2**20 // block_bytes * 16) == (128, 2048)


def test_kv_layers_splits_sliding_and_full_attention() -> None:
    config = LLAMA | {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    layers = {layer.layer_type: (layer.bytes_per_token, layer.max_tokens) for layer in kv_layers(read_shape(config), 2)}
    assert layers == {"sliding_attention": (128, 32), "full_attention": (128, None)}


def test_kv_layers_ignores_a_window_that_is_switched_off() -> None:
    config = LLAMA | {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}
    assert [layer.layer_type for layer in kv_layers(read_shape(config), 2)] == ["full_attention"]


@pytest.mark.parametrize(
    ("config", "cache_heads"), [(LlamaConfig(**LLAMA), 2), (FalconConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2,
     num_attention_heads=4, multi_query=True, new_decoder_architecture=False), 1), (Qwen3Config(**LLAMA, head_dim=32), 2)],
    ids=["llama", "falcon", "qwen3"],
)  # fmt: skip
def test_kv_layers_agrees_with_the_cache_of_the_real_model(config: PretrainedConfig, cache_heads: int) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values
    held = sum(2 * layer.keys.numel() * 4 for layer in cache.layers)
    assert cache.layers[0].keys.shape[1] == cache_heads
    assert 5 * kv_bytes(config.to_dict(), 4) == held


def test_read_shape_names_the_accepted_spellings_when_a_field_is_missing() -> None:
    with pytest.raises(ConfigError, match="missing field for num_layers; accepted: num_hidden_layers, n_layer"):
        read_shape({"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_kv_shared_layers": 2}, "share their cache"),
        ({"model_type": "other", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "other", "text_config": {}}, "text_config"),
    ],
)
def test_read_shape_refuses_caches_that_it_cannot_size(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_shape({"model_type": "other", **{key: value for key, value in LLAMA.items() if key != "model_type"}, **change})


def _saved(config: PretrainedConfig, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_read_facts_counts_an_untied_llama(tmp_path: Path) -> None:
    facts = read_facts(_saved(LlamaConfig(**LLAMA), tmp_path), kv_dtype="float16")
    assert (facts.num_parameters, facts.num_layers, facts.num_kv_heads, facts.head_dim) == (106_816, 2, 2, 16)
    assert facts.parameters_by_part == {
        "attention": 2 * (2 * 64 * 64 + 2 * 32 * 64), "ffn": 2 * 3 * 128 * 64, "embedding": 256 * 64, "head": 256 * 64,
        "norm": 5 * 64, "other": 0,
    }  # fmt: skip
    assert sum(facts.bytes_by_part.values()) == 427_264
    assert facts.num_linear_parameters == 73_728
    assert facts.flop_per_token == 2 * (73_728 + 256 * 64)
    assert facts.flop_per_token_per_context == 4 * 2 * 64
    assert (facts.kv_bytes_per_token, facts.dtype, facts.tied_head, facts.architecture) == (
        256,
        "float32",
        False,
        "LlamaForCausalLM",
    )


def test_read_facts_counts_a_tied_head_once_but_multiplies_with_it(tmp_path: Path) -> None:
    facts = read_facts(_saved(LlamaConfig(**LLAMA | {"tie_word_embeddings": True}), tmp_path))
    assert (facts.num_parameters, facts.tied_head, facts.parameters_by_part["head"]) == (90_432, True, 0)
    assert facts.flop_per_token == 2 * (73_728 + 256 * 64)


def test_read_facts_reads_gpt2_names_and_transposed_matrices(tmp_path: Path) -> None:
    directory = _saved(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=128), tmp_path)
    facts = read_facts(directory)
    assert (facts.num_parameters, facts.hidden_size, facts.intermediate_size, facts.max_position) == (124_672, 64, 256, 128)
    assert facts.num_linear_parameters == 2 * 12 * 64 * 64


def test_read_facts_counts_visited_experts_only_in_flops(tmp_path: Path) -> None:
    config = MixtralConfig(**LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1})
    directory = _saved(config, tmp_path)
    facts = read_facts(directory)
    assert facts.num_parameters == 254_784
    attention, expert = 2 * (2 * 64 * 64 + 2 * 32 * 64), 2 * 3 * 128 * 64
    assert facts.num_linear_parameters == attention + 4 * expert
    assert facts.flop_per_token == 2 * (attention + expert + 256 * 64)


def test_read_facts_trusts_headers_over_the_stated_dtype(tmp_path: Path) -> None:
    directory = _saved(LlamaConfig(**LLAMA), tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert read_facts(directory).dtype == "float32"


def test_read_facts_refuses_an_unknown_cache_type(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="unknown type 'fp5'; known: float32"):
        read_facts(tiny_llama, kv_dtype="fp5")
