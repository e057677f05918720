"""How time and memory of quantization grow: with depth, for one layer of a 70B model, for a 70B checkpoint without data.

1. `walk-8` .. `walk-64`: tiny Llamas of 8 to 64 layers, second moments and GPTQ in a child process. Peak memory is the
   child's own (`ru_maxrss`, pages of mapped files included); time is the child's CPU time, which a busy machine stretches
   least. Ratios are between neighbours, median and extremes over the repeats.
2. `layer70b`: one 28672-wide layer (down_proj, 8192 x 28672) from a moment of random inputs; `--scale` divides both sides,
   and memory is then carried to full size by the square, which the case names.
3. `datafree70b`: blocks of a 70B-shaped checkpoint with embedding and head from a seeded virtual source, rounded to int4-g64.
   `--layers 80` is the whole; peak memory does not depend on it.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.evidence import Figure, append

LIBRARIES = ("torch", "transformers", "safetensors", "scipy")
DEPTHS = (8, 16, 32, 64)
HIDDEN, INTERMEDIATE, KV, VOCABULARY = 8192, 28672, 1024, 128256
"""Source: config.json of Llama-3.1-70B."""


def peak_rss_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def walk(depth: int, folder: Path) -> dict[str, float]:
    """Quantize a tiny Llama of `depth` layers along one walk."""
    from model_optimizer.models.tiny import write_tiny_llama
    from model_optimizer.protocols import Quiet
    from model_optimizer.quantization.calibration import CalibrationSource
    from model_optimizer.quantization.config import CalibrationConfig
    from model_optimizer.quantization.parts import Parts
    from model_optimizer.quantization.propagation import Propagation, quantize_along
    from model_optimizer.quantization.registry import METHODS
    from model_optimizer.quantization.walk import plan_walk

    model = folder / f"model-{depth}"
    if not model.exists():
        write_tiny_llama(model, num_layers=depth, hidden_size=128, intermediate_size=256, tied=False)
        return {}  # making the model is another process's memory
    text = folder / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills. " * 6}) for n in range(48)))
    source = CalibrationSource.of(CalibrationConfig(path=text), folder)
    base_bytes = peak_rss_bytes()
    planned = plan_walk(model, source, num_sequences=32, max_tokens=256)
    start_s = time.process_time()  # what comes before is the same for all depths
    plan = {layer.name: "int4-g64" for group in planned.groups for layer in group}
    with tempfile.TemporaryDirectory(dir=folder) as workspace:
        parts = Parts(Path(workspace) / "parts")
        quantize_along(Propagation(planned, plan, METHODS.get("gptq"), parts), Path(workspace), Quiet())
    return {"cpu_s": time.process_time() - start_s, "peak_bytes": peak_rss_bytes(), "base_bytes": base_bytes}


def layer70b(scale: int, folder: Path) -> dict[str, float]:
    """Quantize one down projection from its moment, read from disk as the stage does."""
    import torch

    from model_optimizer.artifacts.moments import MomentPlace, Moments
    from model_optimizer.formats.registry import FORMATS
    from model_optimizer.models.sources import VirtualSource
    from model_optimizer.quantization import hessian
    from model_optimizer.quantization.methods import gptq
    from model_optimizer.quantization.moments import read_moment, save_moments
    from model_optimizer.quantization.registry import METHODS

    gptq.CHUNK_ELEMENTS["cpu"] //= scale**2  # pieces are of one size at any width; scaled with the rest, they grow back with it
    hessian.BUILD_ROWS //= scale
    rows, columns = HIDDEN // scale, INTERMEDIATE // scale
    source = VirtualSource({"weight": (rows, columns)}, seed=1)
    base_bytes, start_s = peak_rss_bytes(), time.process_time()
    generator = torch.Generator().manual_seed(0)
    sum_II = torch.zeros(columns, columns)
    for _ in range(4):
        inputs_NI = torch.randn(1024, columns, generator=generator)
        sum_II.addmm_(inputs_NI.T, inputs_NI)
    file = folder / "moment.safetensors"
    save_moments(file, {"layer": sum_II.div_(4096)})
    del sum_II, inputs_NI
    places = {"layer": MomentPlace(file=file.name, tensor="layer", in_features=columns)}
    moments = Moments(places=places, num_tokens=4096)
    tensor = METHODS.get("gptq").quantize(
        source.rows("weight", 0, rows), FORMATS.get("int4-g64"), read_moment(folder, moments, "layer")
    )
    assert tensor.codes_OI.shape == (rows, columns)
    return {"cpu_s": time.process_time() - start_s, "peak_bytes": peak_rss_bytes(), "base_bytes": base_bytes}


def datafree70b(num_layers: int, folder: Path) -> dict[str, float]:
    """Round a 70B-shaped checkpoint of so many blocks, embedding and head at full size."""
    from model_optimizer.models.sources import VirtualSource, llama_shapes
    from model_optimizer.protocols import Quiet
    from model_optimizer.quantization.data_free import DataFreeJob, quantize_data_free

    shapes = llama_shapes(num_layers, HIDDEN, INTERMEDIATE, KV, VOCABULARY)
    plan = {name.removesuffix(".weight"): "int4-g64" for name in shapes if "_proj." in name}
    base_bytes, start_s = peak_rss_bytes(), time.process_time()
    job = DataFreeJob(VirtualSource(shapes, seed=0), "seed 0", {"model_type": "llama"}, plan)
    quantize_data_free(job, folder / "out", progress=Quiet())
    return {"cpu_s": time.process_time() - start_s, "peak_bytes": peak_rss_bytes(), "base_bytes": base_bytes}


PARTS = {"walk": walk, "layer70b": layer70b, "datafree70b": datafree70b}


def in_child(part: str, size: int, folder: Path) -> dict[str, float]:
    """Return what a part measures in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.quantize_growth", "--child", part, "--size", str(size), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def depth_figures(folder: Path, repeats: int) -> list[Figure]:
    """Return growth between neighbouring depths; the depths take turns, so that a busy spell meets all of them."""
    for depth in DEPTHS:
        in_child("walk", depth, folder)
    runs = [{depth: in_child("walk", depth, folder) for depth in DEPTHS} for _ in range(repeats)]
    figures = []
    for depth in DEPTHS:
        for metric, unit in (("cpu_s", "s"), ("peak_bytes", "bytes")):
            figures.append(_spread(f"walk-{depth}", metric, unit, [run[depth][metric] for run in runs]))
    for lower, upper in pairwise(DEPTHS):
        for metric, name in (("cpu_s", "time_ratio_2x_layers"), ("peak_bytes", "rss_ratio_2x_layers")):
            ratios = [run[upper][metric] / run[lower][metric] for run in runs]
            figures.append(_spread(f"ours-{lower}to{upper}", name, "ratio", ratios))
    return figures


def _spread(case: str, metric: str, unit: str, values: list[float]) -> Figure:
    return Figure(case, metric, median(values), unit, min(values), max(values), len(values))


def layer_figures(folder: Path, scale: int) -> list[Figure]:
    """Return the 70B-shaped layer; what was scaled down says so, and so does what it would be at full size."""
    layer = in_child("layer70b", scale, folder)
    grown = layer["peak_bytes"] - layer["base_bytes"]
    figures = [
        Figure(f"ours-1/{scale}", "layer70b_peak_rss_bytes", layer["peak_bytes"], "bytes", n=1),
        Figure(f"ours-1/{scale}", "layer70b_cpu_s", layer["cpu_s"], "s", n=1),
    ]
    if scale > 1:
        full_bytes = layer["base_bytes"] + grown * scale**2
        figures.append(Figure("ours-extrapolated", "layer70b_peak_rss_bytes", full_bytes, "bytes", n=1))
    return figures


def checkpoint_figures(folder: Path, num_layers: int) -> list[Figure]:
    """Return the 70B-shaped checkpoint."""
    whole = in_child("datafree70b", num_layers, folder)
    return [
        Figure(f"ours-{num_layers}-layers", "datafree70b_peak_rss_bytes", whole["peak_bytes"], "bytes", n=1),
        Figure(f"ours-{num_layers}-layers", "datafree70b_cpu_s", whole["cpu_s"], "s", n=1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=int, default=4, help="divides the sides of the 70B layer; 1 needs 16 GiB")
    parser.add_argument("--layers", type=int, default=1, help="blocks of the 70B checkpoint; 80 writes 38 GB")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--child", choices=list(PARTS))
    parser.add_argument("--size", type=int)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(PARTS[arguments.child](arguments.size, arguments.folder)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        figures: list[Figure] = []
        if "walk" in arguments.parts:
            figures += depth_figures(folder, arguments.repeats)
        if "layer70b" in arguments.parts:
            figures += layer_figures(folder, arguments.scale)
        if "datafree70b" in arguments.parts:
            figures += checkpoint_figures(folder, arguments.layers)
    append(__file__, figures, LIBRARIES)


if __name__ == "__main__":
    main()
