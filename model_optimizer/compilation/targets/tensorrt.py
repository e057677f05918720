"""TensorRT: known by name, refused with the reason that its runtime gives."""

from pathlib import Path

from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant
from model_optimizer.errors import UnsupportedError
from model_optimizer.runtimes.backends.tensorrt import REASON


class TensorRtTarget:
    """Refuse, naming what is missing."""

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        raise UnsupportedError(REASON)

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        """Raise UnsupportedError."""
        raise UnsupportedError(REASON)


TARGETS.register("tensorrt")(TensorRtTarget())
