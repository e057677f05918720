"""PyTorch runs the checkpoint as it is: the engine directory is a second name for its files.

From level 2 on the runtime compiles parts of the forward pass when it opens the engine; torch keeps what it compiled in its own
cache, so that the next opening is short.
"""

import shutil
from pathlib import Path

from model_optimizer.artifacts.compiled import Engine, Layout
from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant
from model_optimizer.compilation.worker import ENGINE, LAYOUT, link_or_copy
from model_optimizer.models.facts import read_facts
from model_optimizer.runtimes.native_options import COMPILE_MODES, COMPILED_REGIONS
from model_optimizer.runtimes.registry import framework_version
from model_optimizer.store import write_atomically

REGIONS_PER_LAYER = 2
"""Before attention and behind it."""


class TorchTarget:
    """Link the checkpoint's files, and say in layout.json at which level they are opened."""

    def levels(self, recipe: WeightRecipe) -> tuple[int, ...]:
        return (0, *COMPILE_MODES)

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        return (Variant("as stored"),)

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        engine = workspace / ENGINE
        shutil.rmtree(engine, ignore_errors=True)
        engine.mkdir(parents=True)
        for path in sorted(request.checkpoint.iterdir()):
            if path.is_file():
                link_or_copy(path, engine / path.name)
        content = _layout(request).model_dump_json(indent=1).encode()
        write_atomically(workspace / LAYOUT, content)
        if request.config.level in COMPILE_MODES:
            write_atomically(engine / LAYOUT, content)
        num_bytes = sum(path.stat().st_size for path in engine.glob("*.safetensors"))
        version = framework_version("torch")
        return Built(Engine(runtime="torch", directory=ENGINE, num_bytes=num_bytes, framework_version=version), LAYOUT, None)


def _layout(request: BuildRequest) -> Layout:
    inputs, level = ("input_ids", "attention_mask", "position_ids"), request.config.level
    plain = Layout(level=level, inputs=inputs, outputs=("logits",), fused=())
    if level not in COMPILE_MODES:
        return plain
    gain = Measure(
        name=f"{COMPILED_REGIONS}_gain",
        dimension=Dimension.SPEED,
        unit="ratio",
        value=None,
        origin=Origin.NOT_MEASURED,
        reason="regions are compiled when the engine is opened, which is after this file is written; the scan races the engine",
    )
    num_layers = read_facts(request.model.path).num_layers
    return plain.model_copy(update={"fusions": {COMPILED_REGIONS: REGIONS_PER_LAYER * num_layers}, "gains": (gain,)})


TARGETS.register("torch")(TorchTarget())
