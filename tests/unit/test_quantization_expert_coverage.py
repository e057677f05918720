"""Tokens per expert, against the routing computed by hand from what enters each router."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from model_optimizer.errors import ConfigError
from model_optimizer.quantization.expert_coverage import count_expert_tokens, coverage_warnings, require_expert_tokens

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SEQUENCES = [list(range(10, 60)), list(range(100, 117))]


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=1)).eval()


def qwen3_moe() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, head_dim=16)
    return Qwen3MoeForCausalLM(config).eval()


@pytest.mark.parametrize(("make", "num_experts", "num_chosen"), [(mixtral, 4, 1), (qwen3_moe, 8, 2)])
def test_count_expert_tokens_agrees_with_the_router_weights(
    make: Callable[[], nn.Module], num_experts: int, num_chosen: int
) -> None:
    model = make()
    expected = {
        name: torch.zeros(num_experts, dtype=torch.int64) for name, _ in model.named_modules() if name.endswith("mlp.gate")
    }
    for name, counts_E in expected.items():
        router = model.get_submodule(name)

        def add(module: nn.Module, arguments: tuple[torch.Tensor, ...], counts_E: torch.Tensor = counts_E) -> None:
            scores_TE = arguments[0].reshape(-1, 64) @ module.get_parameter("weight").T
            chosen = scores_TE.argsort(dim=-1, descending=True)[:, :num_chosen]
            counts_E += torch.bincount(chosen.flatten(), minlength=num_experts)

        router.register_forward_pre_hook(add)
    loads = count_expert_tokens(model, SEQUENCES)
    assert {load.router: load.tokens_per_expert for load in loads} == {
        name: tuple(found.tolist()) for name, found in expected.items()
    }
    assert len(loads) == 2 and all(load.num_tokens == 67 and sum(load.tokens_per_expert) == 67 * num_chosen for load in loads)


def test_coverage_warnings_name_three_of_four_experts_when_one_token_is_repeated() -> None:
    model = mixtral()
    loads = count_expert_tokens(model, [[40] * 32])
    assert [load.tokens_per_expert for load in loads] == [(0, 0, 0, 32), (32, 0, 0, 0)]
    assert [load.never_reached for load in loads] == [(0, 1, 2), (1, 2, 3)]
    (warning,) = coverage_warnings(loads)
    assert "reaches 2 of 8 experts" in warning and "model.layers.1.mlp.gate 3" in warning
    assert sum(parameter.numel() for parameter in model.parameters()) == 254_784
    assert not any(module._forward_hooks for module in model.modules())


def test_require_expert_tokens_counts_those_below_the_minimum() -> None:
    loads = count_expert_tokens(mixtral(), SEQUENCES)
    below = [(load.router, count) for load in loads for count in load.tokens_per_expert if count < 20]
    require_expert_tokens(loads, 0)
    with pytest.raises(ConfigError, match=rf"^{len(below)} experts see fewer than 20 calibration tokens: model\.layers"):
        require_expert_tokens(loads, 20)


def test_count_expert_tokens_is_empty_without_experts() -> None:
    assert count_expert_tokens(nn.Sequential(nn.Linear(4, 4)), []) == () and coverage_warnings(()) == ()
