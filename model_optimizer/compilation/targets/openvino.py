"""OpenVINO engines: the ONNX export with the checkpoint's own integer weights, converted to OpenVINO's format."""

from pathlib import Path

from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.graph_build import graph_build, rounded_variants
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant


class OpenVinoTarget:
    """Read the graph that ONNX Runtime's target makes, and save it as OpenVINO does; codes and scales are unchanged."""

    def levels(self, recipe: WeightRecipe) -> tuple[int, ...]:
        """Return the one there is: OpenVINO fuses whatever it compiles."""
        return (1,)

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        return rounded_variants(recipe)

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        return graph_build("openvino", request, variant, workspace)


TARGETS.register("openvino")(OpenVinoTarget())
