"""Stage 3: from a recipe to a checkpoint whose every layer is planned, stored and accounted for."""

from pathlib import Path

import torch

from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from model_optimizer.artifacts.moments import Moments
from model_optimizer.artifacts.quantized import Coverage, LayerPlan, LayerSensitivity, QuantizedModel, Sensitivity
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.decisions import Decision
from model_optimizer.formats.base import QuantizedTensor, WeightFormat
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.model_config import read_config
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import Progress
from model_optimizer.quantization.allocation import allocate
from model_optimizer.quantization.breaker import GroupRule, Planned, damage_of, group_rules, suspects
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.coverage import measure_coverage, require_coverage, true_bits_per_weight
from model_optimizer.quantization.layers import (
    LinearLayer,
    ModelLayers,
    fitting_formats,
    read_layers,
    require_fit,
    tie_groups,
)
from model_optimizer.quantization.moments import KIND as MOMENTS
from model_optimizer.quantization.moments import MomentsInputs, measure_moments, read_moment
from model_optimizer.quantization.parts import Parts, alike, finish
from model_optimizer.quantization.preflight import PASSES_ALONG, announce
from model_optimizer.quantization.propagation import Propagation, quantize_along
from model_optimizer.quantization.registry import METHODS
from model_optimizer.quantization.repair import repair
from model_optimizer.quantization.sensitivity import KIND, SensitivityInputs, measure_sensitivity
from model_optimizer.quantization.walk import plan_walk
from model_optimizer.store import Store, file_refs, stage_key

CHECKPOINT = "checkpoint"
PARTS = "parts"
UPPER_GUESS = "; an upper guess, for it is that of plain rounding, and the method mends what rounding breaks"


class QuantizeInputs(StageInputs):
    """Everything that quantization reads."""

    model: Tree
    recipe: WeightRecipe
    calibration: CalibrationSource
    config: QuantizationConfig
    rejected: Attempt | None = None
    """The candidate whose accuracy gate rejected; its layers are raised."""


def quantize(inputs: QuantizeInputs, workspace: Path, *, store: Store, progress: Progress) -> QuantizedModel:
    """Plan and write the checkpoint of one recipe; an unquantized recipe is skipped, for the source is meant.

    Raises:
        ConfigError: an unknown format or precision, a pattern that matches nothing, no usable calibration sample.
        UnsupportedError: a format does not fit a layer, the budget is too small, the architecture is not covered.
        IntegrityError: what was written is not what was planned.
    """
    layers = read_layers(inputs.model.path)
    if not inputs.recipe.quantized:
        return _skipped(inputs, layers)
    for name in inputs.recipe.formats:
        require_fit(layers.linears, name)
    sensitivity = shared_sensitivity(inputs, store, progress=progress).artifact
    by_layer = {layer.layer: layer for layer in sensitivity.layers}
    rules, decisions = group_rules(layers, inputs.recipe, inputs.config, by_layer)
    chosen = repair(rules, inputs.rejected, by_layer) if inputs.rejected else _choose(rules, inputs.recipe, by_layer)
    plan = chosen.formats
    flags, suspected = suspects(plan, by_layer, inputs.config.cosine_floor)
    _write(inputs, plan, workspace, store, progress)
    tied = bool(read_config(inputs.model.path).tie_word_embeddings)
    coverage = measure_coverage(inputs.model.path, workspace / CHECKPOINT, layers.linears, plan, tied)
    require_coverage(coverage, plan)
    planned = tuple(_layer_plan(layer, plan[layer.name], by_layer, flags, chosen.reasons) for layer in layers.linears)
    predicted = sum(layer.predicted_kl_nats for layer in planned)
    return QuantizedModel(
        recipe=inputs.recipe,
        checkpoint=CHECKPOINT,
        plan=planned,
        coverage=coverage,
        predicted_kl_nats=predicted,
        raised=chosen.raised,
        calibration=sensitivity.calibration,
        files=file_refs(workspace, workspace / CHECKPOINT),
        measures=_measures(inputs, layers, coverage, predicted, sensitivity.num_tokens),
        decisions=(*decisions, *chosen.decisions, *suspected, *_calibration_decisions(sensitivity)),
        warnings=sensitivity.warnings,
    )


def shared_sensitivity(inputs: QuantizeInputs, store: Store, *, progress: Progress) -> Stored[Sensitivity]:
    """Return the model's sensitivity from the store, measured once for all recipes."""
    formats = fitting_formats(read_layers(inputs.model.path).linears)
    wanted = SensitivityInputs(
        fingerprint=inputs.fingerprint,
        model=inputs.model,
        calibration=inputs.calibration,
        formats=formats,
        num_sequences=inputs.config.sensitivity_sequences,
        max_tokens=inputs.config.sensitivity_tokens,
        seed=inputs.config.seed,
    )
    key = stage_key(wanted)
    return store.produce(KIND, key, Sensitivity, lambda workspace: measure_sensitivity(wanted, workspace, progress=progress))


def shared_moments(inputs: QuantizeInputs, store: Store, *, progress: Progress) -> Stored[Moments]:
    """Return the second moments of the model's layer inputs from the store, measured once for all recipes."""
    wanted = MomentsInputs(
        fingerprint=inputs.fingerprint,
        model=inputs.model,
        calibration=inputs.calibration,
        num_sequences=inputs.config.moments_sequences,
        max_tokens=inputs.config.moments_tokens,
    )
    return store.produce(
        MOMENTS, stage_key(wanted), Moments, lambda workspace: measure_moments(wanted, workspace, progress=progress)
    )


def _choose(rules: tuple[GroupRule, ...], recipe: WeightRecipe, sensitivity: dict[str, LayerSensitivity]) -> Planned:
    """Return the assignment of least predicted damage that the recipe's budget allows."""
    num_weights = sum(layer.num_weights for rule in rules for layer in rule.layers)
    options = tuple(tuple(rule.option(name, sensitivity) for name in rule.formats) for rule in rules)
    generous = sum(max(option.num_bytes for option in group) for group in options)
    budget_bytes = int(recipe.bits_budget * num_weights / 8) if recipe.bits_budget else generous
    allocation = allocate(options, budget_bytes)
    plan, reasons = {}, {}
    for rule, name in zip(rules, allocation.formats, strict=True):
        for layer in rule.layers:
            plan[layer.name] = name
            reasons[layer.name] = "allocation" if len(rule.formats) > 1 else rule.reason
    if recipe.bits_budget is None:
        return Planned(plan, reasons)
    counts = {
        f"num_layers_{name.replace('-', '_')}": float(list(plan.values()).count(name)) for name in sorted(set(plan.values()))
    }
    decision = Decision(
        subject="bit budget",
        choice=f"{8 * allocation.num_bytes / num_weights:.4f} of {recipe.bits_budget} bits per weight used",
        because="this assignment has the least predicted KL of all that fit",
        numbers={
            "budget_bytes": budget_bytes,
            "used_bytes": allocation.num_bytes,
            "predicted_kl_nats": allocation.damage_nats,
            **counts,
        },
    )
    return Planned(plan, reasons, decisions=(decision,))


def _write(inputs: QuantizeInputs, plan: dict[str, str], workspace: Path, store: Store, progress: Progress) -> None:
    """Quantize into parts that survive a kill, then assemble the checkpoint and drop the parts."""
    parts = Parts(workspace / PARTS)
    method, model = METHODS.get(inputs.recipe.method), inputs.model.path
    if method.needs_moments and inputs.config.error_propagation == "inputs":
        walk = plan_walk(model, inputs.calibration, inputs.config.moments_sequences, inputs.config.moments_tokens)
        announce(walk, PASSES_ALONG, progress)
        quantize_along(Propagation(walk, plan, method, parts), workspace, progress)
    else:
        _round_apart(inputs, plan, parts, store, progress)

    def quantized(layer: str) -> QuantizedTensor:
        tensor = parts.read(layer, plan[layer])
        assert tensor is not None, f"the part of {layer} vanished while the checkpoint was assembled"
        return tensor

    write_checkpoint(model, workspace / CHECKPOINT, plan, quantized)
    parts.remove()


def _round_apart(inputs: QuantizeInputs, plan: dict[str, str], parts: Parts, store: Store, progress: Progress) -> None:
    """Quantize every layer by itself, from its weight and, where the method needs it, its moment in the full model."""
    method, headers = METHODS.get(inputs.recipe.method), read_headers(inputs.model.path)
    moments = shared_moments(inputs, store, progress=progress) if method.needs_moments else None

    def of_group(leader: str, weight_OI: torch.Tensor, weight_format: WeightFormat) -> QuantizedTensor:
        if moments is None:
            return method.quantize(weight_OI, weight_format)
        return method.quantize(weight_OI, weight_format, read_moment(moments.directory, moments.artifact, leader))

    layers = tuple(layer for layer in read_layers(inputs.model.path).linears if FORMATS.get(plan[layer.name]).on_grid)
    groups = tie_groups(layers)
    for group in progress.track(groups, "quantize", len(groups)):
        for format_name, alike_layers in alike(group, plan):
            finish(parts, alike_layers, format_name, lambda name: read_tensor(headers[f"{name}.weight"]), of_group)


def _layer_plan(
    layer: LinearLayer,
    format_name: str,
    sensitivity: dict[str, LayerSensitivity],
    suspect: dict[str, bool],
    reasons: dict[str, str],
) -> LayerPlan:
    weight_format = FORMATS.get(format_name)
    return LayerPlan(
        layer=layer.name,
        format=format_name,
        num_weights=layer.num_weights,
        num_bytes=weight_format.num_bytes(layer.out_features, layer.in_features),
        predicted_kl_nats=damage_of(sensitivity[layer.name], format_name),
        output_cosine=sensitivity[layer.name].output_cosine[format_name] if weight_format.on_grid else 1.0,
        suspect=suspect[layer.name],
        reason=reasons[layer.name],
    )


def _skipped(inputs: QuantizeInputs, layers: ModelLayers) -> QuantizedModel:
    headers = read_headers(inputs.model.path)
    coverage = Coverage(
        quantized_weights_ratio=0.0,
        true_bits_per_weight=true_bits_per_weight(layers.linears, headers),
        checkpoint_bytes=sum(header.num_bytes for header in headers.values()),
    )
    return QuantizedModel(
        recipe=inputs.recipe,
        checkpoint=None,
        plan=(),
        coverage=coverage,
        predicted_kl_nats=0.0,
        calibration=None,
        measures=_measures(inputs, layers, coverage, 0.0, None),
        skipped_because=f"the recipe is {FULL_PRECISION}: the source model itself is served",
    )


def _measures(
    inputs: QuantizeInputs, layers: ModelLayers, coverage: Coverage, predicted_kl_nats: float, num_tokens: int | None
) -> tuple[Measure, ...]:
    """Return size, true bits, coverage and predicted KL; `num_tokens` is what the prediction rests on."""
    headers = read_headers(inputs.model.path)
    guess = UPPER_GUESS if inputs.recipe.quantized and METHODS.get(inputs.recipe.method).needs_moments else ""
    source_bytes = sum(header.num_bytes for header in headers.values())
    return (
        Measure(
            name="weight_bytes",
            dimension=Dimension.RESOURCE,
            unit="bytes",
            value=coverage.checkpoint_bytes,
            baseline=source_bytes,
            reason="all tensors as stored, packed layers with scales",
        ),
        Measure(
            name="true_bits_per_weight",
            dimension=Dimension.RESOURCE,
            unit="bits",
            value=coverage.true_bits_per_weight,
            baseline=true_bits_per_weight(layers.linears, headers),
            reason="payload and scales of the quantizable layers; embedding, head and norms are not in it",
        ),
        Measure(
            name="coverage_ratio",
            dimension=Dimension.RESOURCE,
            unit="ratio",
            value=coverage.quantized_weights_ratio,
            higher_is_better=True,
            reason="share of the planned weights that the written headers show below 16 bits",
        ),
        Measure(
            name="predicted_kl",
            dimension=Dimension.ACCURACY,
            unit="nats",
            value=predicted_kl_nats,
            baseline=0.0,
            origin=Origin.PREDICTED,
            num_samples=num_tokens,
            reason=f"sum over layers of half the Fisher-weighted squared rounding error per token{guess}",
        ),
    )


def _calibration_decisions(sensitivity: Sensitivity) -> tuple[Decision, ...]:
    report = sensitivity.calibration
    return (
        Decision(
            subject="calibration",
            choice=f"{report.num_used} of {report.num_read} records used, {report.num_held_out} held out",
            because="; ".join(sensitivity.warnings) or "enough usable records were found",
            numbers={"num_tokens": report.num_tokens, "sensitivity_tokens": sensitivity.num_tokens},
        ),
    )
