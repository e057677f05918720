"""Quantize a model whose type the walk does not cover: llm-compressor rounds, this product plans, writes, proves and judges.

No sensitivity is measured beforehand, so that one format is planned for all layers and nothing is allocated. Predicted KL and
cosines are those of the weights as stored, measured afterwards.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from model_optimizer.artifacts.quantized import LayerPlan, QuantizedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.decisions import Decision
from model_optimizer.errors import IntegrityError, UnsupportedError
from model_optimizer.formats.base import QuantizedTensor
from model_optimizer.formats.compressed_tensors import (
    read_checkpoint_headers,
    read_plan,
    read_quantized_layer,
    write_checkpoint,
)
from model_optimizer.formats.model_config import read_config
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.protocols import Progress
from model_optimizer.quantization.adaptors.llmcompressor import (
    OutsideJob,
    configured_interpreter,
    library_versions,
    quantize_outside,
)
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.coverage import measure_coverage, require_coverage
from model_optimizer.quantization.diagnosis import LayerDiagnosis, diagnose
from model_optimizer.quantization.figures import size_measures
from model_optimizer.quantization.layers import ModelLayers, matching_layers, read_plain_layers, require_fit
from model_optimizer.quantization.linear_models import load_linear
from model_optimizer.quantization.sequence_gradients import visit_gradients
from model_optimizer.store import file_refs

CHECKPOINT = "checkpoint"
NOT_RUN = "the KL breaker and the allocation did not run: this model type goes through llm-compressor, in one format"
JUDGED_SEQUENCES = 8
"""Calibration samples over which the stored weights are judged."""


@dataclass(frozen=True, slots=True)
class OutsideCase:
    """What is quantized, and how."""

    model: Path
    recipe: WeightRecipe
    calibration: CalibrationSource
    config: QuantizationConfig


def quantize_uncovered(case: OutsideCase, workspace: Path, *, progress: Progress) -> QuantizedModel:
    """Write and judge the checkpoint of a recipe with one format.

    Raises:
        UnsupportedError: no llm-compressor is at hand, the model has no linear layers that can be told apart, a recipe with
            a choice of formats, or llm-compressor failed.
        IntegrityError: what came back is not what was planned.
    """
    layers = read_plain_layers(case.model)
    plan = _plan(case, layers)
    interpreter = configured_interpreter()
    versions = library_versions(interpreter, workspace)
    prepared = prepare(case.calibration, case.model)
    sequences = tuple(it[: case.config.moments_tokens] for it in prepared.samples[: case.config.moments_sequences])
    _require_judgeable(case.model, plan, sequences[0])
    job = OutsideJob(case.model, plan, case.recipe.method, sequences, case.config.seed)
    theirs = quantize_outside(job, interpreter, workspace, progress=progress)
    take_over(job, theirs, workspace / CHECKPOINT)
    coverage = measure_coverage(case.model, workspace / CHECKPOINT, layers.linears, plan, _is_tied(case.model))
    require_coverage(coverage, plan)
    judged = diagnose(
        case.model,
        workspace / CHECKPOINT,
        sequences[:JUDGED_SEQUENCES],
        cosine_floor=case.config.cosine_floor,
        num_measured=0,
        progress=progress,
    )
    shutil.rmtree(theirs)
    total = sum(it.predicted_kl_nats for it in judged)
    return QuantizedModel(
        recipe=case.recipe,
        checkpoint=CHECKPOINT,
        plan=_layer_plans(layers, plan, judged),
        coverage=coverage,
        predicted_kl_nats=total,
        calibration=prepared.report,
        files=file_refs(workspace, workspace / CHECKPOINT),
        measures=(
            *size_measures(case.model, layers, coverage),
            _predicted(total, sum(map(len, sequences[:JUDGED_SEQUENCES]))),
        ),
        decisions=(_method_decision(case, versions),),
        warnings=(*prepared.warnings, NOT_RUN),
    )


def _plan(case: OutsideCase, layers: ModelLayers) -> dict[str, str]:
    """Return every layer's format: the recipe's, unless the profile skips the layer or demands another."""
    if len(case.recipe.formats) != 1:
        raise UnsupportedError(
            f"a model of this type gets one format for all layers, the recipe has {', '.join(case.recipe.formats)}; "
            "give whole bits, such as 4"
        )
    plan = dict.fromkeys((layer.name for layer in layers.linears), case.recipe.formats[0])
    for pattern in case.config.skip_layers:
        plan |= dict.fromkeys(matching_layers(pattern, layers), FULL_PRECISION)
    for override in case.config.layer_overrides:
        for pattern in override.layers:
            plan |= dict.fromkeys(matching_layers(pattern, layers), override.precision)
    for name in sorted(set(plan.values())):
        require_fit(tuple(layer for layer in layers.linears if plan[layer.name] == name), name)
    return plan


def _require_judgeable(model: Path, plan: dict[str, str], sequence: tuple[int, ...]) -> None:
    """Try on a short sequence, before anything long begins, whether every layer's gradient can be seen."""
    seen: set[str] = set()
    loaded = load_linear(model).requires_grad_(False)
    visit_gradients(loaded, tuple(plan), (sequence[:8],), (0,), lambda name, gradient_BOI: seen.add(name))
    if unseen := sorted(plan.keys() - seen):
        raise UnsupportedError(f"{unseen[0]} and {len(unseen) - 1} more layers are never called; name them in skip_layers")


def take_over(job: OutsideJob, theirs: Path, target: Path) -> None:
    """Write the checkpoint anew from the source and their codes and scales, which they keep as float32 of float16 values.

    Raises:
        IntegrityError: they stored other layers or formats than were asked for, or scales that the format cannot hold.
    """
    headers, found = read_checkpoint_headers(theirs), read_plan(theirs)
    asked = {layer: job.plan[layer] for layer in job.on_grid}
    if found != asked:
        differing = sorted(layer for layer in asked.keys() | found.keys() if asked.get(layer) != found.get(layer))
        raise IntegrityError(
            f"llm-compressor stored {differing[0]} as {found.get(differing[0], 'it was')}, asked for was "
            f"{asked.get(differing[0], 'to leave it')} ({len(differing)} such layers)"
        )

    def quantized(layer: str) -> QuantizedTensor:
        tensor = read_quantized_layer(theirs, headers, layer, found[layer])
        scale_OG = tensor.scale_OG.to(FORMATS.get(found[layer]).scale_dtype)
        if not torch.equal(scale_OG.to(tensor.scale_OG.dtype), tensor.scale_OG):
            raise IntegrityError(f"llm-compressor's scales of {layer} are not those of {found[layer]}, in {scale_OG.dtype}")
        return replace(tensor, scale_OG=scale_OG)

    write_checkpoint(job.model, target, job.plan, quantized)


def _is_tied(model: Path) -> bool:
    return bool(read_config(model).tie_word_embeddings)


def _layer_plans(layers: ModelLayers, plan: dict[str, str], judged: tuple[LayerDiagnosis, ...]) -> tuple[LayerPlan, ...]:
    by_layer = {it.layer: it for it in judged}
    return tuple(
        LayerPlan(
            layer=layer.name,
            format=plan[layer.name],
            num_weights=layer.num_weights,
            num_bytes=FORMATS.get(plan[layer.name]).num_bytes(layer.out_features, layer.in_features),
            predicted_kl_nats=by_layer[layer.name].predicted_kl_nats if layer.name in by_layer else 0.0,
            output_cosine=by_layer[layer.name].output_cosine if layer.name in by_layer else 1.0,
            suspect=layer.name in by_layer and by_layer[layer.name].suspect,
            reason="llm-compressor" if layer.name in by_layer else "demanded by the profile",
        )
        for layer in layers.linears
    )


def _predicted(total_nats: float, num_tokens: int) -> Measure:
    return Measure(
        name="predicted_kl",
        dimension=Dimension.ACCURACY,
        unit="nats",
        value=total_nats,
        baseline=0.0,
        origin=Origin.PREDICTED,
        num_samples=num_tokens,
        reason="half the Fisher-weighted squared error of the stored weights per token, by rows, summed over layers",
    )


def _method_decision(case: OutsideCase, versions: dict[str, str]) -> Decision:
    stack = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Decision(
        subject="method",
        choice=f"{case.recipe.method} of llm-compressor",
        because=f"model type {read_config(case.model).model_type!r} is not covered by this product's own walk; {stack}",
    )
