"""ONNX Runtime engines: one float32 export per model, integer weights swapped in per strategy."""

import time
from pathlib import Path

from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.compiled import Engine, ExportedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant
from model_optimizer.compilation.worker import ENGINE, LAYOUT, REPRODUCE, BuildSpec, run_isolated
from model_optimizer.formats.registry import FULL_PRECISION
from model_optimizer.runtimes.registry import framework_version
from model_optimizer.store import file_refs, stage_key

EXPORT = "export"
QUANTIZED = (
    Variant("int8 activations", 4, 32, "integer products are fastest, and small blocks round activations less"),
    Variant("float32 activations", 1, 64, "rounding activations to int8 broke parity"),
)
"""Source: SmolLM2-135M, 2 cores with AVX-512, decode tok/s at batch 1 / 4, and KL against float32 activations in nats:
float32 38.8 / 118; int8 weights with int8 activations in blocks of 64: 67 / 199, 0.0070; of 32: 67 / 195, 0.0027;
of 16: 62 / 175, 0.0018; with float32 activations 5.5 / 29, 0; int4 weights with int8 activations in blocks of
64: 80 / 231, 0.0081; of 32: 79 / 207, 0.0045; of 16: 0.0032; with float32 activations 72 / 131, 0."""


class ExportInputs(StageInputs):
    """What the shared export depends on."""

    model: Tree


def _precision(request: BuildRequest) -> str:
    """Return the formats that the checkpoint's layers really have, joined by `+`."""
    from model_optimizer.formats.compressed_tensors import read_plan

    return "+".join(sorted(set(read_plan(request.checkpoint).values()))) or FULL_PRECISION


class OnnxRuntimeTarget:
    """Swap a checkpoint's integer weights into the export; a float32 engine is the export itself."""

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        if not recipe.quantized:
            return (Variant("float32"),)
        return QUANTIZED

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        exported = self._export(request)
        spec = BuildSpec(
            step="onnxruntime",
            source=exported.directory,
            output=workspace,
            checkpoint=request.checkpoint if request.recipe.quantized else None,
            level=request.config.level,
            accuracy_level=variant.accuracy_level,
            block_size=variant.block_size,
            precision=_precision(request),
        )
        run_isolated(spec, workspace, request.config.timeout_s)
        num_bytes = sum(path.stat().st_size for path in (workspace / ENGINE).iterdir())
        version = framework_version("onnxruntime")
        engine = Engine(runtime="onnxruntime", directory=ENGINE, num_bytes=num_bytes, framework_version=version)
        return Built(engine, LAYOUT, REPRODUCE)

    def _export(self, request: BuildRequest) -> Stored[ExportedModel]:
        """Return the export of the source model, made once for all strategies."""
        inputs = ExportInputs(fingerprint=request.fingerprint, model=request.model)

        def make(directory: Path) -> ExportedModel:
            start = time.monotonic()
            run_isolated(
                BuildSpec(step="export", source=request.model.path, output=directory), directory, request.config.timeout_s
            )
            files = file_refs(directory, directory / "model.onnx", directory / "model.onnx.data", directory / REPRODUCE)
            num_bytes = sum(file.num_bytes for file in files if file.path != REPRODUCE)
            return ExportedModel(graph="model.onnx", num_bytes=num_bytes, export_s=time.monotonic() - start, files=files)

        return request.store.produce(EXPORT, stage_key(inputs), ExportedModel, make)


TARGETS.register("onnxruntime")(OnnxRuntimeTarget())
