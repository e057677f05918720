"""TensorRT engines in float16, or with a checkpoint's own symmetric integers; built here, run by nobody yet.

The runtime refuses before a run gets here. `TensorRtTarget().build` is for those who deploy the engine themselves.
"""

from pathlib import Path

from model_optimizer.artifacts.compiled import Engine, Layout
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.export_stage import exported, precision_of
from model_optimizer.compilation.graph_form import GraphForm
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant
from model_optimizer.compilation.tensorrt_log import last_phase
from model_optimizer.compilation.worker import (
    ENGINE,
    LAYOUT,
    LOG,
    REPRODUCE,
    BuildSpec,
    Range,
    ShapeProfile,
    TensorRtBuild,
    run_isolated,
)
from model_optimizer.errors import CompileError
from model_optimizer.runtimes.registry import framework_version
from model_optimizer.spec import Sla, Traffic

FORM = GraphForm(explicit_cache=True, dtype="float16")
TIMINGS = "timings"
"""Folder of the store: kernel timings, one file per GPU, driver and library."""


def shape_profiles(sla: Sla, traffic: Traffic) -> tuple[ShapeProfile, ShapeProfile]:
    """Return the shapes that an engine is tuned for: one for prompts, one for decoding.

    A prompt comes alone, whole or as the rest behind a cached prefix. Decoding has between one and all streams of the limits,
    each with a prompt and what was said so far in its cache. Nothing is longer than the model length that the limits state.
    """
    prompt, output, longest = traffic.prompt_tokens, traffic.output_tokens, sla.max_model_len
    prefill = ShapeProfile(
        batch=Range(least=1, usual=1, most=1),
        sequence=Range(least=1, usual=min(prompt.p50, longest), most=min(prompt.max, longest)),
        past=Range(least=0, usual=0, most=min(prompt.max, longest - 1)),
    )
    most_past = min(prompt.max + output.max, longest) - 1  # the last token is never in the cache
    decode = ShapeProfile(
        batch=Range(least=1, usual=max(1, round(sla.concurrency / 2)), most=sla.concurrency),
        sequence=Range(least=1, usual=1, most=1),
        past=Range(least=1, usual=min(prompt.p50 + output.p50 // 2, most_past), most=most_past),
    )
    return prefill, decode


class TensorRtTarget:
    """Read the export with an explicit cache, its weights swapped for the checkpoint's codes."""

    def levels(self, recipe: WeightRecipe) -> tuple[int, ...]:
        return (1,)

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        return (Variant("float16"),)

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        """Write engine, layout.json and reproduce.py.

        Raises:
            UnsupportedError: TensorRT is missing, does not build for the GPU, or none was named and there is none.
            IntegrityError: the timing cache for this GPU is damaged.
            CompileError: the build failed, also because of weights that it does not know, or ran out of time.
        """
        from model_optimizer.compilation.gpu_results import gpu_key, read_timings
        from model_optimizer.compilation.tensorrt_engine import check_gpu, library

        trt = library()
        check_gpu(trt, request.config.tensorrt_gpu)
        key = gpu_key(trt.__name__, trt.__version__, request.config.tensorrt_gpu)
        timings = request.store.root / TIMINGS / f"{key.name}.cache"
        read_timings(timings, key)  # a damaged one is told before anything is built
        spec = BuildSpec(
            step="tensorrt",
            source=exported(request, FORM).directory,
            output=workspace,
            checkpoint=request.checkpoint if request.recipe.quantized else None,
            level=request.config.level,
            precision=precision_of(request),
            form=FORM,
            tensorrt=TensorRtBuild(
                profiles=shape_profiles(request.sla, request.traffic),
                gpu=request.config.tensorrt_gpu,
                timing_cache=timings,
                version_compatible=request.config.tensorrt_version_compatible,
                hardware_compatible=request.config.tensorrt_hardware_compatible,
            ),
        )
        _run(spec, workspace, request.config.timeout_s)
        num_bytes = sum(path.stat().st_size for path in (workspace / ENGINE).iterdir())
        engine = Engine(
            runtime="tensorrt",
            directory=ENGINE,
            num_bytes=num_bytes,
            framework_version=framework_version(trt.__name__.replace("_", "-")),
            compute_capability=key.compute_capability,
            driver=key.driver,
        )
        layout = Layout.model_validate_json((workspace / LAYOUT).read_bytes())
        return Built(engine, LAYOUT, REPRODUCE, tuple(op.name for op in layout.fused if op.executed_by is not None))


def _run(spec: BuildSpec, workspace: Path, timeout_s: float) -> None:
    """Build in a process of its own; where that fails, say what the builder was at.

    Raises:
        CompileError: it failed or ran out of time; carries the reproduce script.
    """
    try:
        run_isolated(spec, workspace, timeout_s)
    except CompileError as error:
        phase = last_phase((workspace / LOG).read_text(errors="replace"))
        raise CompileError(f"{error}; its last phase: {phase}", error.reproduce) from error


TARGETS.register("tensorrt")(TensorRtTarget())
