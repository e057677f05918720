"""ONNX Runtime engines: one float32 export per model, integer weights swapped in per strategy."""

from dataclasses import replace
from pathlib import Path

from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.graph_build import graph_build, rounded_variants
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, Variant

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
        if request.config.level >= AGGRESSIVE and variant.rounds:
            variant = replace(variant, block_size=AGGRESSIVE_BLOCK)
        return graph_build("onnxruntime", request, variant, workspace)


TARGETS.register("onnxruntime")(OnnxRuntimeTarget())
