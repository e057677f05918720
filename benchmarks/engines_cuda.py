"""ONNX Runtime on a GPU: parity with the checkpoint, and decoding speed beside torch, eager and compiled, interleaved.

    python -m benchmarks.engines_cuda check --model DIRECTORY --folder F --case onnxruntime-int4-g64-level2
    python -m benchmarks.engines_cuda measure --model DIRECTORY --folder F

`check` builds one engine as the product does and holds it against transformers in float32 on the CPU, each case in a process of
its own, for a fault in a kernel spoils the GPU's context. `measure` opens every engine that was checked, and the torch arms in
float16: transformers with a static cache as it is, compiled, compiled with CUDA graphs, and the native runtime as it is and with
compiled regions. A prompt of 64 tokens comes before the clock; every arm has each step's tokens in this process's memory before
the next step begins. `bandwidth_ratio` is weight bytes times steps per second over the rate at which this GPU reads memory.
A case that fails is a row with the reason. The rows stand in `targets_h200.csv`.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from benchmarks.engines_cpu import PLAN, VOCABULARY, Arm, checkpoint_of, recipe_of, reference_for, runtime_arm
from benchmarks.evidence import Figure, append
from benchmarks.torch_cuda_arm import TorchArm, parity_of_torch, read_bytes_per_s
from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.compiled import Engine
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.fusion_cuda import FUSED_LEVEL, form_on_cuda
from model_optimizer.compilation.parity import Reference, compare
from model_optimizer.compilation.registry import TARGETS, BuildRequest
from model_optimizer.errors import ModelOptimizerError
from model_optimizer.measurement.interleave import interleave
from model_optimizer.measurement.paired import ratio_of_pairs
from model_optimizer.protocols import LogitsRuntime
from model_optimizer.runtimes.backends.onnxruntime import MODEL, Place, open_model, open_session
from model_optimizer.runtimes.decoder_model import ModelInput
from model_optimizer.runtimes.decoding import DecodingRuntime
from model_optimizer.runtimes.native_options import NativeOptions
from model_optimizer.runtimes.ort_models import CUDA, InPlaceOrtModel
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.runtimes.torch.engine import open_native
from model_optimizer.store import Store

BASELINE = "transformers-float16"
COMPILED = {"torch-compile-float16": "default", "torch-compile-float16-graphs": "reduce-overhead"}
"""Arm -> mode of torch.compile."""
NATIVE = {"torch-float16-level0": 0, "torch-float16-level2": 2}
"""Arm -> compile level of the native runtime."""
FAULTS = (
    ModelOptimizerError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    OSError,
    ImportError,
    ort_errors.Fail,
    ort_errors.EPFail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
"""What an engine may end with; it becomes a row."""
KL_LIMIT = 0.01
RESULT = "checked.json"


@dataclass(frozen=True)
class Case:
    """One ONNX Runtime engine."""

    format_name: str
    level: int

    @property
    def name(self) -> str:
        """Return e.g. `onnxruntime-float16-level2`, by what it computes where no weight is an integer."""
        name = form_on_cuda(self.level).dtype if self.format_name == "float32" else self.format_name
        return f"onnxruntime-{name}-level{self.level}"


CASES = {
    case.name: case
    for case in (
        Case("float32", 1),
        Case("float32", 2),
        Case("int8-channel", 2),
        Case("int4-g64", 2),
    )
}
"""From level 2 on an engine computes in float16."""


def build(case: Case, model: Path, folder: Path) -> tuple[Engine, Path]:
    """Build an engine for the GPU; return it and the folder that it lies in."""
    checkpoint, target = folder / "checkpoint", TARGETS.get("onnxruntime")
    checkpoint = checkpoint_of(model, case.format_name, checkpoint)
    recipe = recipe_of(case.format_name)
    config = CompileConfig(level=case.level, onnxruntime_device="cuda", timeout_s=300)
    request = BuildRequest(Tree.of(model), checkpoint, recipe, config, "benchmark", Store(folder / "store"))
    workspace = folder / "built"
    workspace.mkdir()
    engine = target.build(request, target.variants(recipe)[0], workspace).engine
    return engine, workspace / engine.directory


def check(case: Case, model: Path, folder: Path) -> list[Figure]:
    """Build, open and compare one engine; what is found is kept for `measure`."""
    folder.mkdir(parents=True)
    start = time.perf_counter()
    engine, directory = build(case, model, folder)
    build_s = time.perf_counter() - start
    runtime = RUNTIMES.get("onnxruntime").open(engine, directory, PLAN)
    recorded = [] if case.level < FUSED_LEVEL else [recording_figure(case.name, directory)]
    reference = reference_for(model if case.format_name == "float32" else folder / "checkpoint")
    figures = [
        Figure(case.name, "build_s", build_s, "s"),
        Figure(case.name, "engine_bytes", engine.num_bytes, "bytes"),
        *parity_figures(case.name, runtime, reference),
        *recorded,
        *[Figure(case.name, f"{kind}_nodes_count", count, "count") for kind, count in places(directory).items()],
    ]
    kept = {"engine": engine.model_dump(), "directory": str(directory), "figures": [asdict(figure) for figure in figures]}
    (folder / RESULT).write_text(json.dumps(kept))
    return figures


def parity_figures(name: str, runtime: LogitsRuntime, reference: Reference) -> list[Figure]:
    """Return the largest and mean difference of logits, KL, top-1 agreement and whether greedy tokens are equal."""
    parity, n = compare(runtime, reference, KL_LIMIT), sum(map(len, reference.sequences))
    differences = [
        np.abs(runtime.logits(tokens) - expected).mean(-1)
        for tokens, expected in zip(reference.sequences, reference.logits_TV, strict=True)
    ]
    return [
        Figure(name, "parity_max_logit_difference", parity.max_abs_logit_difference, "logits", n=n),
        Figure(name, "parity_mean_logit_difference", float(np.concatenate(differences).mean()), "logits", n=n),
        Figure(name, "parity_kl_nats", parity.mean_kl_nats, "nats", n=n),
        Figure(name, "parity_top1_ratio", parity.top1_agreement_ratio, "ratio", n=n),
        Figure(name, "greedy_equal", float(parity.greedy_tokens_equal), "ratio", n=len(reference.greedy)),
    ]


def unrecorded(directory: Path, page_tokens: int = PLAN.page_tokens) -> InPlaceOrtModel:
    """Return an engine whose steps are launched kernel by kernel."""
    return InPlaceOrtModel(open_session(directory / MODEL, 1, place=Place(CUDA)), 0, page_tokens, CUDA)


def recording_figure(name: str, directory: Path) -> Figure:
    """Return how far logits of recorded steps are from launched ones: two rows that join, a few steps, then one row alone."""
    found = []
    for model in (open_model(directory)[0], unrecorded(directory)):
        seen, caches = [], []
        for length in (5, 9):
            ids = np.arange(7, 7 + length)[None]
            _, cache = model.forward(ModelInput(ids, np.ones_like(ids), np.arange(length)[None], length - 1), None)
            caches.append(cache)
        cache = model.join(caches)
        for step in range(8):
            lengths = np.array([[5 + step], [9 + step]])
            mask_BP = (np.arange(10 + step) >= 9 + step - lengths).astype(np.int64)
            logits, cache = model.forward(ModelInput(np.array([[step], [30 + step]]), mask_BP, lengths), cache)
            seen.append(logits.copy())
        cache = model.select(cache, [1], 0)
        for step in range(17, 20):
            ids = np.array([[step]])
            logits, cache = model.forward(ModelInput(ids, np.ones((1, step + 1), np.int64), np.array([[step]])), cache)
            seen.append(logits.copy())
        found.append(seen)
    worst = max(float(np.abs(a - b).max()) for a, b in zip(*found, strict=True))
    return Figure(name, "recorded_max_logit_difference", worst, "logits", n=len(found[0]))


def places(directory: Path) -> dict[str, int]:
    """Return how many nodes ran on the GPU and on the CPU when one token was decoded."""
    model, session = open_model(directory, profile_prefix=directory.parent / "places")
    one = np.ones((1, 1), np.int64)
    model.forward(ModelInput(one, one, np.zeros_like(one)), None)
    events = json.loads(Path(session.end_profiling()).read_bytes())
    ran = [
        event["args"]["provider"] for event in events if event["name"].endswith("_kernel_time") and "provider" in event["args"]
    ]
    return {name.removesuffix("ExecutionProvider").lower(): count for name, count in Counter(ran).items()}


def opened(folder: Path) -> tuple[dict[str, LogitsRuntime], list[Figure]]:
    """Return every engine that was checked, and what was found of them."""
    runtimes, figures = dict[str, LogitsRuntime](), list[Figure]()
    for name in CASES:
        said = folder / name / RESULT
        if not said.is_file():
            log = folder / f"{name}.log"
            reason = " ".join(log.read_text().split())[-300:] if log.is_file() else "was not checked"
            figures.append(Figure(name, "tok_per_s", None, "tok/s", reason=reason))
            continue
        kept = json.loads(said.read_text())
        figures += [Figure(**figure) for figure in kept["figures"]]
        engine = Engine.model_validate(kept["engine"])
        runtimes[name] = RUNTIMES.get("onnxruntime").open(engine, Path(kept["directory"]), PLAN)
        if CASES[name].level >= FUSED_LEVEL:
            facts = runtimes[name].facts
            runtimes[f"{name}-unrecorded"] = DecodingRuntime(unrecorded(Path(kept["directory"])), facts, PLAN)
    return runtimes, figures


def torch_arms(model: Path) -> dict[str, Callable[[], Arm]]:
    """Return what makes each arm of torch; making one may fail."""
    makers: dict[str, Callable[[], Arm]] = {BASELINE: lambda: TorchArm(model, None)}
    makers |= {name: _compiled(model, mode) for name, mode in COMPILED.items()}
    options = NativeOptions(dtype="float16")
    return makers | {name: _native(model, options, level) for name, level in NATIVE.items()}


def _of_runtime(runtime: LogitsRuntime) -> Callable[[], Arm]:
    return lambda: runtime_arm(runtime, VOCABULARY)


def _compiled(model: Path, mode: str) -> Callable[[], Arm]:
    return lambda: TorchArm(model, mode)


def _native(model: Path, options: NativeOptions, level: int) -> Callable[[], Arm]:
    return lambda: runtime_arm(open_native(model, PLAN, options, level=level), VOCABULARY)


def warm(makers: dict[str, Callable[[], Arm]], batches: tuple[int, ...]) -> tuple[dict[str, Arm], list[Figure]]:
    """Make every arm and run it twice at every batch; one that fails is left out."""
    arms, failed = dict[str, Arm](), list[Figure]()
    for name, make in makers.items():
        start = time.perf_counter()
        try:
            arm = make()
            for batch in batches:
                rates = [arm(batch) for _ in range(2)]
                print(f"{name} batch {batch}: {rates[-1]:.1f} tok/s, {time.perf_counter() - start:.1f} s", flush=True)
        except FAULTS as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(name, said, flush=True)
            failed.append(Figure(name, "tok_per_s", None, "tok/s", reason=said))
        else:
            arms[name] = arm
    return arms, failed


def measured(arms: dict[str, Arm], weight_bytes: dict[str, int], batch: int, rounds: int) -> list[Figure]:
    """Return rates, ratios to the baseline and shares of the memory's rate at one batch."""
    found = interleave({name: _at(arm, batch) for name, arm in arms.items()}, rounds)
    bandwidth, figures = read_bytes_per_s(), list[Figure]()
    for name, values in found.items():
        case, median = f"{name}-batch{batch}", float(np.median(values))
        figures.append(Figure(case, "tok_per_s", median, "tok/s", min(values), max(values), rounds))
        for other in (it for it in (BASELINE, *COMPILED) if it in found and it != name and name.startswith("onnxruntime")):
            ratio = ratio_of_pairs(values, found[other], seed=0)
            bounds = (ratio.interval.lower, ratio.interval.upper)
            figures.append(Figure(case, f"over_{other}_ratio", ratio.value, "ratio", *bounds, len(values)))
        if weight_bytes.get(name):
            figures.append(Figure(case, "bandwidth_ratio", weight_bytes[name] * median / batch / bandwidth, "ratio"))
    return figures


def _at(arm: Arm, batch: int) -> Arm:
    return lambda _: arm(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("check", "measure"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where engines lie between the steps")
    parser.add_argument("--case", choices=tuple(CASES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--begin", type=Path, help="torch is warmed up beside other work; what follows waits for this file")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4))
    asked = parser.parse_args()
    model = asked.model.absolute()
    if asked.step == "check":
        for name in (asked.case,) if asked.case else CASES:
            try:
                for figure in check(CASES[name], model, asked.folder / name):
                    print(figure.case, figure.metric, figure.value, flush=True)
            except FAULTS as error:
                said = f"{type(error).__name__}: {' '.join(str(error).split())}"
                (asked.folder / f"{name}.log").write_text(said)
                print(name, said, flush=True)
        return
    batches = tuple(asked.batches)
    figures = parity_of_torch(model, reference_for(model), BASELINE)
    arms, failed = warm(torch_arms(model), batches)
    print("warm", flush=True)
    while asked.begin is not None and not asked.begin.exists():
        time.sleep(0.5)
    runtimes, found = opened(asked.folder)
    engines, faults = warm({name: _of_runtime(runtime) for name, runtime in runtimes.items()}, batches)
    arms, figures, failed = engines | arms, [*found, *figures], [*failed, *faults]
    weight_bytes = {name: runtime.memory().weight_bytes for name, runtime in runtimes.items()}
    for batch in asked.batches:
        figures += measured(arms, weight_bytes, batch, asked.rounds)
    script = str(Path(__file__).with_name("targets_h200.py"))
    named = [replace(figure, reason=figure.reason or "make bench NAME=engines_cuda") for figure in figures + failed]
    append(script, named, ("onnxruntime", "torch", "transformers"))


if __name__ == "__main__":
    main()
