"""GPTQ on a GPU at the size of an 8B model: a random checkpoint of that shape, 128 x 2048 tokens, int4 in groups of 128.

Weights and tokens are random, which is fair for time and memory and says nothing of quality. The walk rounds each block from
what its rounded predecessors give (`error_propagation: inputs`); `walk` is that, `assemble` packs and writes the checkpoint.
Making the random checkpoint is not counted.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from benchmarks.evidence import Figure, append
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization.blocks import StreamedModel, find_stack
from model_optimizer.quantization.layers import input_groups, read_layers
from model_optimizer.quantization.parts import Parts
from model_optimizer.quantization.propagation import Propagation, quantize_along
from model_optimizer.quantization.registry import METHODS
from model_optimizer.quantization.walk import Walk

LIBRARIES = ("torch", "transformers")
FORMAT = "int4-g128"


class Clock(Quiet):
    """Prints how long each block took."""

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        before = time.perf_counter()
        for item in items:
            yield item
            print(f"{label} {item}: {time.perf_counter() - before:.2f} s", flush=True)
            before = time.perf_counter()


def write_random(folder: Path, num_layers: int, hidden: int) -> None:
    """Write a random bf16 checkpoint of Llama-3.1-8B's proportions, one shard per block."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator).cpu()

    wide, kv = config.intermediate_size, config.num_key_value_heads * 128
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    weight_map: dict[str, str] = {}
    for number in range(-1, num_layers):
        if number < 0:
            tensors = {name: draw(128256, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
            tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        else:
            prefix = f"model.layers.{number}."
            tensors = {f"{prefix}{name}.weight": draw(*shape) for name, shape in shapes.items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        shard = f"model-{number + 2:05}-of-{num_layers + 1:05}.safetensors"
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="an empty place for 30 GB, e.g. on a memory file system")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    asked = parser.parse_args()
    source, workspace = asked.folder / "source", asked.folder / "work"
    start = time.perf_counter()
    write_random(source, asked.layers, asked.hidden)
    print(f"random checkpoint: {time.perf_counter() - start:.1f} s", flush=True)
    layers = read_layers(source).linears
    stack = find_stack(layers)
    generator = torch.Generator().manual_seed(1)
    sequences = tuple(
        tuple(torch.randint(0, 128256, (asked.length,), generator=generator).tolist()) for _ in range(asked.sequences)
    )
    plan, parts = {layer.name: FORMAT for layer in layers}, Parts(workspace / "parts")
    start = time.perf_counter()
    walk = Walk(StreamedModel(source, stack), stack, input_groups(layers), sequences)
    quantize_along(Propagation(walk, plan, METHODS.get("gptq"), parts), workspace, Clock())
    walked_s = time.perf_counter() - start
    print(f"walk: {walked_s:.1f} s", flush=True)

    def finished(layer: str) -> QuantizedTensor:
        tensor = parts.read(layer, FORMAT)
        assert tensor is not None
        return tensor

    write_checkpoint(source, asked.folder / "quantized", plan, finished)
    wall_s = time.perf_counter() - start
    case = f"llama-{asked.layers}x{asked.hidden}-{asked.sequences}x{asked.length}"
    figures = [
        Figure(case, "wall_s", wall_s, "s", n=asked.sequences * asked.length),
        Figure(f"{case}-walk", "wall_s", walked_s, "s"),
        Figure(f"{case}-assemble", "wall_s", wall_s - walked_s, "s"),
    ]
    if torch.cuda.is_available():
        figures.append(Figure(case, "peak_gpu_bytes", torch.cuda.max_memory_allocated(), "bytes"))
    append(__file__, figures, LIBRARIES)
    shutil.rmtree(asked.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
