"""OpenVINO engines: the ONNX export with the checkpoint's own integer weights, converted to OpenVINO's format."""

from pathlib import Path

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.export_stage import exported, precision_of
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant
from model_optimizer.compilation.worker import ENGINE, LAYOUT, REPRODUCE, BuildSpec, run_isolated
from model_optimizer.runtimes.registry import framework_version

QUANTIZED = (
    Variant("int8 activations", 4, 32, "integer products are fastest, and small groups round activations less"),
    Variant("float32 activations", 1, 64, "rounding activations to int8 broke parity"),
)


class OpenVinoTarget:
    """Read the graph that ONNX Runtime's target makes, and save it as OpenVINO does; codes and scales are unchanged."""

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        if not recipe.quantized:
            return (Variant("float32"),)
        return QUANTIZED

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        spec = BuildSpec(
            step="openvino",
            source=exported(request).directory,
            output=workspace,
            checkpoint=request.checkpoint if request.recipe.quantized else None,
            level=request.config.level,
            accuracy_level=variant.accuracy_level,
            block_size=variant.block_size,
            precision=precision_of(request),
        )
        run_isolated(spec, workspace, request.config.timeout_s)
        num_bytes = sum(path.stat().st_size for path in (workspace / ENGINE).iterdir())
        version = framework_version("openvino")
        return Built(
            Engine(runtime="openvino", directory=ENGINE, num_bytes=num_bytes, framework_version=version), LAYOUT, REPRODUCE
        )


TARGETS.register("openvino")(OpenVinoTarget())
