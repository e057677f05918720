"""TensorRT engines in float16, or with a checkpoint's own symmetric integers; built here, run by nobody yet.

The runtime refuses before a run gets here. `TensorRtTarget().build` is for those who deploy the engine themselves.
"""

from pathlib import Path

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.export_stage import exported, precision_of
from model_optimizer.compilation.graph_form import GraphForm
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant
from model_optimizer.compilation.worker import (
    ENGINE,
    LAYOUT,
    REPRODUCE,
    BuildSpec,
    Range,
    ShapeProfile,
    TensorRtBuild,
    run_isolated,
)
from model_optimizer.runtimes.registry import framework_version

FORM = GraphForm(explicit_cache=True, dtype="float16")
TIMINGS = "timing.cache"
PREFILL = ShapeProfile(
    batch=Range(least=1, usual=1, most=1), sequence=Range(least=1, usual=64, most=512), past=Range(least=0, usual=0, most=512)
)
DECODE = ShapeProfile(
    batch=Range(least=1, usual=4, most=16), sequence=Range(least=1, usual=1, most=1), past=Range(least=1, usual=128, most=1023)
)
"""One prompt or a chunk of it, and decoding rows, as long as the default traffic's longest."""


class TensorRtTarget:
    """Read the export with an explicit cache, its weights swapped for the checkpoint's codes."""

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        return (Variant("float16"),)

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        """Write engine, layout.json and reproduce.py.

        Raises:
            UnsupportedError: TensorRT is missing.
            CompileError: the build failed, also because of weights or a GPU that it does not know.
        """
        from model_optimizer.compilation.tensorrt_engine import library

        name = library().__name__
        spec = BuildSpec(
            step="tensorrt",
            source=exported(request, FORM).directory,
            output=workspace,
            checkpoint=request.checkpoint if request.recipe.quantized else None,
            level=request.config.level,
            precision=precision_of(request),
            form=FORM,
            tensorrt=TensorRtBuild(
                profiles=(PREFILL, DECODE), gpu=request.config.tensorrt_gpu, timing_cache=request.store.root / TIMINGS
            ),
        )
        run_isolated(spec, workspace, request.config.timeout_s)
        num_bytes = sum(path.stat().st_size for path in (workspace / ENGINE).iterdir())
        version = framework_version(name.replace("_", "-"))
        return Built(
            Engine(runtime="tensorrt", directory=ENGINE, num_bytes=num_bytes, framework_version=version), LAYOUT, REPRODUCE
        )


TARGETS.register("tensorrt")(TensorRtTarget())
