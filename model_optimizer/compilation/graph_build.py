"""What the targets share that build from the plain ONNX export: ways to round activations, and one isolated build."""

from pathlib import Path
from typing import Literal

from model_optimizer.artifacts.compiled import Engine, Layout
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.export_stage import exported, precision_of
from model_optimizer.compilation.fusion_cuda import form_on_cuda
from model_optimizer.compilation.registry import BuildRequest, Built, Variant
from model_optimizer.compilation.worker import ENGINE, LAYOUT, REPRODUCE, BuildSpec, run_isolated
from model_optimizer.runtimes.backends.onnxruntime import distribution
from model_optimizer.runtimes.registry import framework_version

_QUANTIZED = (
    Variant("int8 activations", 4, 32, "integer products are fastest, and small blocks round activations less"),
    Variant("float32 activations", 1, 64, "rounding activations to int8 broke parity"),
)


def rounded_variants(recipe: WeightRecipe) -> tuple[Variant, ...]:
    """Return the ways to compute with a recipe's weights, fastest first."""
    return _QUANTIZED if recipe.quantized else (Variant("float32"),)


def graph_build(runtime: Literal["onnxruntime", "openvino"], request: BuildRequest, variant: Variant, workspace: Path) -> Built:
    """Build an engine from the shared export, in a process of its own.

    Raises:
        CompileError: the build failed or ran out of time; carries the reproduce script.
    """
    device = request.config.onnxruntime_device if runtime == "onnxruntime" else "cpu"
    form = form_on_cuda(request.config.level) if device == "cuda" else None
    spec = BuildSpec(
        step=runtime,
        source=exported(request, form).directory,
        output=workspace,
        checkpoint=request.checkpoint if request.recipe.quantized else None,
        level=request.config.level,
        accuracy_level=variant.accuracy_level,
        block_size=variant.block_size,
        precision=precision_of(request),
        gain_rounds=request.config.fusion_rounds,
        device=device,
    )
    run_isolated(spec, workspace, request.config.timeout_s)
    name = distribution() if runtime == "onnxruntime" else runtime
    num_bytes = sum(path.stat().st_size for path in (workspace / ENGINE).iterdir())
    engine = Engine(runtime=runtime, directory=ENGINE, num_bytes=num_bytes, framework_version=framework_version(name))
    layout = Layout.model_validate_json((workspace / LAYOUT).read_bytes())
    return Built(engine, LAYOUT, REPRODUCE, tuple(op.name for op in layout.fused if op.executed_by is not None))
