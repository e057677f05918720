"""GPTQ on a GPU at the size of an 8B model: a random checkpoint of that shape, 128 x 2048 tokens, int4 in groups of 128.

Weights and tokens are random, which is fair for time and memory and says nothing of quality. The walk rounds each block from
what its rounded predecessors give (`error_propagation: inputs`); `walk` is that, `assemble` packs and writes the checkpoint.
Making the random checkpoint is not counted.
"""

import argparse
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.evidence import Figure, append
from benchmarks.random_llama import VOCAB_SIZE, write_random
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
        tuple(torch.randint(0, VOCAB_SIZE, (asked.length,), generator=generator).tolist()) for _ in range(asked.sequences)
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
