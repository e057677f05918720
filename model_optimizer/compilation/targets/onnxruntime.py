"""ONNX Runtime engines: one export per model and number type, integer weights swapped in per strategy."""

from dataclasses import replace
from pathlib import Path

from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.fusion_cuda import form_on_cuda
from model_optimizer.compilation.graph_build import graph_build, rounded_variants
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant
from model_optimizer.runtimes.backends.onnxruntime import require_device
from model_optimizer.runtimes.ort_models import CUDA

AGGRESSIVE, AGGRESSIVE_BLOCK = 3, 64
"""The level at which activations are rounded in larger blocks, and their size."""
"""Source: SmolLM2-135M, 2 cores with AVX-512, decode tok/s at batch 1 / 4, and KL against float32 activations in nats:
float32 38.8 / 118; int8 weights with int8 activations in blocks of 64: 67 / 199, 0.0070; of 32: 67 / 195, 0.0027;
of 16: 62 / 175, 0.0018; with float32 activations 5.5 / 29, 0; int4 weights with int8 activations in blocks of
64: 80 / 231, 0.0081; of 32: 79 / 207, 0.0045; of 16: 0.0032; with float32 activations 72 / 131, 0."""


class OnnxRuntimeTarget:
    """Swap a checkpoint's integer weights into the export; a float32 engine is the export itself."""

    def levels(self, recipe: WeightRecipe) -> tuple[int, ...]:
        return (0, 1, 2, AGGRESSIVE) if recipe.quantized else (0, 1, 2)

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        return rounded_variants(recipe)

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        """Write engine, layout.json and reproduce.py.

        Raises:
            UnsupportedError: it shall run on a GPU, and the installed ONNX Runtime knows none.
            CompileError: the build failed or ran out of time; carries the reproduce script.
        """
        if request.config.onnxruntime_device == CUDA:
            require_device(CUDA)
            unrounded = _on_cuda(request.config.level)
            return replace(graph_build("onnxruntime", request, unrounded, workspace), variant=unrounded)
        if request.config.level >= AGGRESSIVE and variant.rounds:
            variant = replace(variant, block_size=AGGRESSIVE_BLOCK)
        return graph_build("onnxruntime", request, variant, workspace)


def _on_cuda(level: int) -> Variant:
    """Return how engines for a GPU compute: nothing is rounded to int8 there."""
    return Variant(form_on_cuda(level).dtype, because="its kernels on a GPU take codes of weights and float activations")


TARGETS.register("onnxruntime")(OnnxRuntimeTarget())
