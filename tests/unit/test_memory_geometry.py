"""Which layers keep which cache, against the caches that transformers really builds and against published figures."""

from collections.abc import Mapping

import pytest
import torch

from model_optimizer.memory.geometry import read_geometry

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
NUM_TOKENS = 12


def cache_bytes(config: Mapping[str, object], num_tokens: int) -> tuple[int, int]:
    """Return the bytes that transformers' own cache takes after `num_tokens`, and how many layers have one."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

    torch.manual_seed(0)
    built = CONFIG_MAPPING[str(config["model_type"])].from_dict(dict(config))
    model = AutoModelForCausalLM.from_config(built, dtype=torch.float32).eval()
    cache = DynamicCache(config=built)
    with torch.no_grad():
        for _ in range(num_tokens):  # one by one: a sliding layer then keeps its window only
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    layers = [layer for layer in cache.layers if layer.is_initialized]
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers), len(layers)


@pytest.mark.parametrize(("kv_heads", "attention"), [(4, "MHA"), (2, "GQA"), (1, "MQA")])
def test_read_geometry_counts_kv_heads_as_the_real_cache_does(kv_heads: int, attention: str) -> None:
    config = {"model_type": "llama", "num_key_value_heads": kv_heads, **TINY}
    _, geometry = read_geometry(config)
    real, num_layers = cache_bytes(config, NUM_TOKENS)
    assert geometry.attention == attention
    assert geometry.request_bytes(NUM_TOKENS, 1, "float32") == real
    assert geometry.request_bytes(NUM_TOKENS, 1, "int8") == real // 4 + NUM_TOKENS * num_layers * 2 * kv_heads * 4
    assert sum(group.num_layers for group in geometry.groups) == num_layers == 4


def test_read_geometry_bounds_sliding_layers_by_their_window() -> None:
    config = {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 5, **TINY}
    _, geometry = read_geometry(config)
    real, _ = cache_bytes(config, NUM_TOKENS)
    per_token = 4 * 2 * 2 * 8 * 4
    assert real == 4 * per_token  # transformers keeps window - 1 tokens: the present one attends before it is kept
    assert geometry.request_bytes(NUM_TOKENS, 1, "float32") == NUM_TOKENS * per_token
    assert geometry.windowed_request_bytes(NUM_TOKENS, 1, "float32") == (5 + 1) * per_token
    assert geometry.windowed_request_bytes(3, 1, "float32") == 3 * per_token


def test_windowed_request_bytes_bounds_only_the_sliding_groups() -> None:
    types = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = {
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": types,
        **TINY,
    }
    _, geometry = read_geometry(config)
    assert [(group.layer_type, group.num_layers, group.window) for group in geometry.groups] == [
        ("sliding_attention", 3, 4),
        ("full_attention", 1, None),
    ]
    per_layer = 2 * 8 * 4
    assert geometry.windowed_request_bytes(100, 4, "float32") == per_layer * (3 * 8 + 100)
    assert geometry.request_bytes(100, 4, "float32") == per_layer * 4 * 100


def test_read_geometry_gives_layers_that_share_no_cache() -> None:
    config = {
        "model_type": "gemma3n_text", "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 64, "num_kv_shared_layers": 2,
        "layer_types": ["full_attention"] * 4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
        "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4, **TINY,
    }  # fmt: skip
    _, geometry = read_geometry(config)
    real, num_layers = cache_bytes(config, NUM_TOKENS)
    assert (geometry.num_shared_layers, num_layers) == (2, 2)
    assert geometry.request_bytes(NUM_TOKENS, 1, "float32") == real


def test_read_geometry_of_a_latent_cache_is_the_published_figure() -> None:
    config = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "vocab_size": 129280,
    }  # fmt: skip
    _, geometry = read_geometry(config)
    assert geometry.attention == "MLA"
    # 70.272 KB a token in bfloat16. Source: DeepSeek-V3 (arXiv 2505.09343), table 1
    assert geometry.layout(16, "bfloat16").bytes_per_token == 70_272
    assert geometry.layout(16, "int8").scale_bytes_per_page == 61 * 4


@pytest.mark.parametrize(
    ("layers", "kv_heads", "expected"),
    [(126, 8, 516_096), (80, 8, 327_680)],  # Llama 3.1 405B and Qwen 2.5 72B, same table
)
def test_read_geometry_of_grouped_caches_is_the_published_figure(layers: int, kv_heads: int, expected: int) -> None:
    config = {
        "model_type": "llama", "hidden_size": 128 * 64, "intermediate_size": 1, "num_hidden_layers": layers,
        "num_attention_heads": 64, "num_key_value_heads": kv_heads, "vocab_size": 1,
    }  # fmt: skip
    assert read_geometry(config)[1].layout(16, "bfloat16").bytes_per_token == expected
