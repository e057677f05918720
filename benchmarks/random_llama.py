"""A random checkpoint of Llama-3.1-8B's proportions, plain or quantized: fair for time and memory, says nothing of quality."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from model_optimizer.formats.base import WeightFormat
from model_optimizer.formats.compressed_tensors import quantization_section
from model_optimizer.formats.registry import FORMATS
from model_optimizer.formats.storage import SCALE, SHAPE, stored_parts

VOCAB_SIZE, HEAD_DIM = 128256, 128
_DTYPES = {"I32": torch.int32, "I8": torch.int8, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
CODE_STD = 100.0
"""Of float8 codes: a quarter of the largest, so that few are cut off."""
Formats = Mapping[str, str]
"""Part of a linear's name -> its format."""


def config_of(num_layers: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


def write_random(folder: Path, num_layers: int, hidden: int, format_name: str | None = None) -> None:
    """Write a checkpoint, one shard per block; with a format all linears of blocks are random codes with one scale."""
    write_random_mix(folder, num_layers, hidden, {"": format_name} if format_name else {})


def write_random_mix(folder: Path, num_layers: int, hidden: int, formats: Formats) -> None:
    """Write a checkpoint whose linears have the format of the first part that their name contains; without any, bfloat16."""
    config = config_of(num_layers, hidden)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    plan: dict[str, str] = {}
    for number in range(-1, num_layers):
        tensors = dict(_outside(hidden, generator) if number < 0 else _block(config, number, formats, generator))
        shard = f"model-{number + 2:05}-of-{num_layers + 1:05}.safetensors"
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
        if formats and number >= 0:
            plan |= {f"model.layers.{number}.{name}": _format_of(name, formats) for name in _shapes(config)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if plan:
        path = folder / "config.json"
        stated = json.loads(path.read_text()) | {"quantization_config": quantization_section(plan)}
        path.write_text(json.dumps(stated))


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    hidden, wide, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * HEAD_DIM
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }


def _drawn(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=generator.device).normal_(0, 0.02, generator=generator)


def _outside(hidden: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield name, _drawn((VOCAB_SIZE, hidden), generator)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)


def _format_of(name: str, formats: Formats) -> str:
    return next(chosen for part, chosen in formats.items() if part in name)


def _block(config: LlamaConfig, number: int, formats: Formats, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = f"model.layers.{number}."
    for name, shape in _shapes(config).items():
        if formats:
            yield from _random_parts(prefix + name, shape, FORMATS.get(_format_of(name, formats)), generator)
        else:
            yield f"{prefix}{name}.weight", _drawn(shape, generator)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{norm}.weight", torch.ones(config.hidden_size, dtype=torch.bfloat16)


def _random_parts(
    layer: str, shape: tuple[int, int], weight_format: WeightFormat, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a layer's tensors: bytes of codes drawn evenly, and the scale at which weights have a deviation of 0.02."""
    for part in stored_parts(weight_format, *shape):
        if part.suffix == SHAPE:
            yield layer + SHAPE, torch.tensor(shape, dtype=torch.int64)
        elif part.suffix == SCALE:
            step = 0.02 / CODE_STD if weight_format.storage == "float-quantized" else 0.02 * 12**0.5 / 2**weight_format.bits
            yield layer + SCALE, torch.full(part.shape, step, dtype=_DTYPES[part.dtype])
        elif part.dtype == "F8_E4M3":
            drawn = torch.empty(part.shape, device=generator.device).normal_(0, CODE_STD, generator=generator)
            yield layer + part.suffix, drawn.clamp_(-448, 448).to(torch.float8_e4m3fn)
        else:
            limits = torch.iinfo(_DTYPES[part.dtype])
            codes = torch.randint(limits.min, limits.max, part.shape, generator=generator, device=generator.device)
            yield layer + part.suffix, codes.to(_DTYPES[part.dtype])
