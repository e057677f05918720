"""Bytes of the KV cache and of the budget, pinned to numbers worked by hand (M1, X15, X17, X23)."""

import pytest

from model_optimizer.artifacts.target import KvLayer, ModelFacts
from model_optimizer.memory.budget import (
    PROCESS_BYTES,
    RUNTIME_CONTEXT_BYTES,
    Budget,
    activation_bytes,
    binary_size,
    kv_bytes_per_token,
    pages_for,
    request_tokens,
    resident_weight_bytes,
    workspace_bytes,
)
from model_optimizer.memory.kv_layout import KvLayerShape, KvLayout
from model_optimizer.spec import Lengths, Sla, Traffic

FACTS = ModelFacts(
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_parameters=1_000_000,
    num_linear_parameters=800_000,
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=260,
    max_position=512,
    tied_head=True,
    dtype="float32",
    parameters_by_part={},
    bytes_by_part={},
    flop_per_token=2_000_000,
    flop_per_token_per_context=512,
    kv=(KvLayer(layer_type="full_attention", num_layers=2, bytes_per_token=512),),
)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "expected"),
    [
        (32, 8, 128, 131_072),  # Llama-3-8B: four times less than the 524,288 of its 32 attention heads
        (28, 4, 128, 57_344),  # Qwen2-7B
        (80, 8, 128, 327_680),  # Llama-3-70B
        (32, 32, 128, 524_288),  # 7B with full multi-head attention: half a MiB
    ],
)
def test_kv_bytes_per_token_counts_kv_heads_in_float16(layers: int, kv_heads: int, head_dim: int, expected: int) -> None:
    assert kv_bytes_per_token(layers, kv_heads, head_dim, 2) == expected


def test_binary_size_of_32_x_2048_x_4_bytes_is_256_kib_and_not_mb() -> None:
    assert binary_size(32 * 2048 * 4) == "256 KiB"


@pytest.mark.parametrize(("bytes_per_token", "expected"), [(131_072, "8 GiB"), (524_288, "32 GiB")])
def test_binary_size_of_32_sequences_of_2048_tokens(bytes_per_token: int, expected: str) -> None:
    assert binary_size(32 * 2048 * bytes_per_token) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (16, 1), (17, 2), (0, 0)])
def test_pages_for_rounds_up(tokens: int, expected: int) -> None:
    assert pages_for(tokens, 16) == expected


def test_request_tokens_is_p95_of_both_within_the_longest_allowed() -> None:
    traffic = Traffic(prompt_tokens=Lengths(p50=10, p95=100, max=200), output_tokens=Lengths(p50=5, p95=50, max=90))
    assert request_tokens(traffic, Sla(max_model_len=2048)) == 150
    assert request_tokens(traffic, Sla(max_model_len=120)) == 120


def test_activation_bytes_is_logits_scores_and_layer_vectors() -> None:
    # logits 3 x 260, scores 4 x 10 x 10, vectors 10 x (6 x 64 + 2 x 128), float32
    assert activation_bytes(FACTS, num_tokens=10, num_sequences=2) == 4 * (780 + 400 + 6_400)


@pytest.mark.parametrize(
    ("runtime", "expected"), [("torch", 4_000_000), ("onnxruntime", 700_000 + 4 * 260 * 64), ("other", 700_000)]
)
def test_resident_weight_bytes_unpacks_in_torch_and_copies_the_head_in_onnxruntime(runtime: str, expected: int) -> None:
    assert resident_weight_bytes(runtime, FACTS, 700_000) == expected


def test_budget_lines_add_up_to_what_is_usable() -> None:
    budget = Budget(weight_bytes=100, kv_bytes=200, activation_bytes=50, usable_bytes=2 * 2**30)
    lines = {line.part: line.num_bytes for line in budget.lines()}
    assert sum(lines.values()) == 2 * 2**30
    assert (lines["weights"], lines["kv_reservation"], lines["activations"]) == (100, 200, 50)
    assert lines["margin"] == 2 * 2**30 - 350 - RUNTIME_CONTEXT_BYTES - PROCESS_BYTES


@pytest.mark.parametrize(
    ("precision", "compute", "bytes_per_value"),
    [
        ("bfloat16", "bfloat16", 2),
        ("float16", "float32", 2 + 4),
        ("int8", "float32", 1 + 4),
        ("fp8", "bfloat16", 4 + 2),
    ],
)
def test_workspace_bytes_is_the_widest_layer_gathered(precision: str, compute: str, bytes_per_value: int) -> None:
    layers = (KvLayerShape(2, 16, 16), KvLayerShape(1, 24, 0))
    assert workspace_bytes(KvLayout(layers, 16, precision, compute), 10) == 10 * 64 * bytes_per_value
