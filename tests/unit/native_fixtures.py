"""Tiny checkpoints for the native runtime, and transformers' own greedy tokens to compare with."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from architecture_fixtures import SIZES, write_architecture
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, RequestId

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SMOL = SIZES | {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}
QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
COVERED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "llama-3": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, head_dim=32),
    "llama-yarn": lambda: LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "smollm": lambda: LlamaConfig(**SMOL, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-window": lambda: Qwen2Config(**SIZES, **QWEN2_WINDOW),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=8),
}


def write_covered(name: str, directory: Path) -> Path:
    """Write a random checkpoint of a covered architecture whose biases and norms are not trivial."""
    write_architecture(COVERED[name](), directory)
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(1)
    tensors = load_file(directory / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith(".bias") or "norm" in key:
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def quantize_by_rounding(source: Path, target: Path, formats: Sequence[str]) -> Path:
    """Write a checkpoint whose linears take turns through `formats`, rounded to nearest."""
    layers = [name.removesuffix(".weight") for name in read_headers(source) if "_proj" in name and name.endswith(".weight")]
    plan = {layer: formats[index % len(formats)] for index, layer in enumerate(sorted(layers))}
    headers = read_headers(source)
    write_checkpoint(
        source, target, plan, lambda layer: FORMATS.get(plan[layer]).quantize(read_tensor(headers[f"{layer}.weight"]))
    )
    return target


def greedy(model: PreTrainedModel, prompt: tuple[int, ...], num_new: int) -> list[int]:
    """Return the tokens of transformers' own generation."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
    )
    return output[0, len(prompt) :].tolist()


def kv_plan(num_pages: int = 64, page_tokens: int = 4, max_batch: int = 8, max_model_len: int = 128) -> KvPlan:
    return KvPlan(
        page_tokens=page_tokens, num_pages=num_pages, bytes_per_token=512, max_batch=max_batch, max_model_len=max_model_len
    )


def drain(runtime: LogitsRuntime, tokens: dict[RequestId, list[int]] | None = None) -> dict[RequestId, list[int]]:
    """Step until idle; return the tokens by request."""
    tokens = {} if tokens is None else tokens
    while events := runtime.step():
        for event in events:
            tokens.setdefault(event.request, []).append(event.token)
    return tokens


def generate(runtime: LogitsRuntime, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Submit all at once and return the tokens in the requests' order."""
    ids = [runtime.submit(request) for request in requests]
    tokens = drain(runtime)
    return [tokens[identity] for identity in ids]
