"""PyTorch runs the checkpoint as it is: the engine directory is a second name for its files."""

import shutil
from pathlib import Path

from model_optimizer.artifacts.compiled import Engine, Layout
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant
from model_optimizer.compilation.worker import ENGINE, LAYOUT, link_or_copy
from model_optimizer.runtimes.registry import framework_version
from model_optimizer.store import write_atomically


class TorchTarget:
    """Link the checkpoint's files; nothing is compiled."""

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        return (Variant("as stored"),)

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        engine = workspace / ENGINE
        shutil.rmtree(engine, ignore_errors=True)
        engine.mkdir(parents=True)
        for path in sorted(request.checkpoint.iterdir()):
            if path.is_file():
                link_or_copy(path, engine / path.name)
        layout = Layout(level=0, inputs=("input_ids", "attention_mask", "position_ids"), outputs=("logits",), fused=())
        write_atomically(workspace / LAYOUT, layout.model_dump_json(indent=1).encode())
        num_bytes = sum(path.stat().st_size for path in engine.glob("*.safetensors"))
        version = framework_version("torch")
        return Built(Engine(runtime="torch", directory=ENGINE, num_bytes=num_bytes, framework_version=version), LAYOUT, None)


TARGETS.register("torch")(TorchTarget())
