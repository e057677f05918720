"""Tiny random checkpoints of the architectures that quantization must either take whole or refuse by name."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from model_optimizer.models.tiny import write_byte_tokenizer

SIZES = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 3, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
GEMMA = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, Callable[[bool], PreTrainedConfig]] = {
    "llama": lambda tied: LlamaConfig(**SIZES, tie_word_embeddings=tied),
    "qwen2": lambda tied: Qwen2Config(**SIZES, tie_word_embeddings=tied),
    "qwen3": lambda tied: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=tied),
    "mistral": lambda tied: MistralConfig(**SIZES, tie_word_embeddings=tied),
    "gemma3": lambda tied: Gemma3TextConfig(**SIZES, **GEMMA, tie_word_embeddings=tied),
    "phi3": lambda tied: Phi3Config(**SIZES, tie_word_embeddings=tied),
    "gpt2": lambda tied: GPT2Config(
        vocab_size=260, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=2, tie_word_embeddings=tied
    ),
    "mixtral": lambda tied: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=tied),
    "qwen3-moe": lambda tied: Qwen3MoeConfig(**SIZES, **QWEN_EXPERTS, tie_word_embeddings=tied),
}
NUM_LAYERS = {"phi3": 4, "gpt2": 4, "mixtral": 4 + 4 * 3, "qwen3-moe": 4 + 4 * 3}
"""Quantizable layers of a block, where they are not seven."""


def write_architecture(config: PreTrainedConfig, directory: Path, seed: int = 0) -> Path:
    """Write a random checkpoint, large enough in its weights that rounding shows, with a byte tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "_proj" in name or "c_attn" in name or "c_fc" in name:
                torch.nn.init.normal_(parameter, std=0.2)
            if name.endswith(".gate.weight"):
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory
