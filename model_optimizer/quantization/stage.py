"""Stage 3: from a recipe to a checkpoint whose every layer is planned, stored and accounted for."""

from dataclasses import replace
from pathlib import Path

import torch

from model_optimizer.artifacts.base import Stored, Tree
from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from model_optimizer.artifacts.moments import Moments
from model_optimizer.artifacts.quantized import Coverage, LayerPlan, LayerSensitivity, QuantizedModel, Sensitivity
from model_optimizer.decisions import Decision
from model_optimizer.formats.base import QuantizedTensor, WeightFormat
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.model_config import read_config
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.models.headers import read_headers
from model_optimizer.protocols import Progress
from model_optimizer.quantization.activation_scales import (
    input_step,
    needs_ranges,
    range_decision,
    refuse_experts,
)
from model_optimizer.quantization.asked_formats import (
    INPUTS_NOTE,
    asked_formats,
    rounds_inputs,
)
from model_optimizer.quantization.block_tuning import METHOD as SIGNROUND
from model_optimizer.quantization.block_tuning import Tuning, decision, tune_along
from model_optimizer.quantization.blocks import walking_device
from model_optimizer.quantization.breaker import GroupRule, Planned, damage_of, group_rules, suspects
from model_optimizer.quantization.choice import choose, planned
from model_optimizer.quantization.coverage import measure_coverage, require_coverage, true_bits_per_weight
from model_optimizer.quantization.distillation import Distillation, distill, forget
from model_optimizer.quantization.dry_run import try_if_long
from model_optimizer.quantization.figures import size_measures
from model_optimizer.quantization.kl_budget import keep_kl_budget
from model_optimizer.quantization.layers import (
    LinearLayer,
    ModelLayers,
    find_layers,
    input_groups,
    is_covered,
    read_layers,
    require_fit,
    weight_reader,
)
from model_optimizer.quantization.loaders import loader_warnings
from model_optimizer.quantization.moments import read_moment
from model_optimizer.quantization.outside import OutsideCase, quantize_uncovered
from model_optimizer.quantization.parts import Parts, alike, finish
from model_optimizer.quantization.preflight import PASSES_ALONG, announce
from model_optimizer.quantization.propagation import Propagation, quantize_along
from model_optimizer.quantization.reallocation import LEAST_NATS, LOOKED_AT, reallocate
from model_optimizer.quantization.registry import METHODS
from model_optimizer.quantization.repair import repair
from model_optimizer.quantization.shared import (
    QuantizeInputs,
    shared_moments,
    shared_ranges,
    shared_sensitivity,
    shared_slopes,
)
from model_optimizer.quantization.transforms.base import TransformInputs
from model_optimizer.quantization.transforms.fold import Folded, fold_all, transforms_of
from model_optimizer.quantization.unreached import REASON, quantize_reached, unreached_warnings, unseen_warnings
from model_optimizer.quantization.walk import plan_walk
from model_optimizer.store import Store, file_refs

CHECKPOINT = "checkpoint"
PARTS = "parts"
UPPER_GUESS = "; an upper guess, for it is that of plain rounding, and the method mends what rounding breaks"


def quantize(inputs: QuantizeInputs, workspace: Path, *, store: Store, progress: Progress) -> QuantizedModel:
    """Plan and write the checkpoint of one recipe; an unquantized recipe is skipped, for the source is meant.

    Raises:
        ConfigError: an unknown format or precision, a pattern that matches nothing, no usable calibration sample.
        UnsupportedError: a format does not fit a layer, the budget is too small, the architecture is not covered.
        IntegrityError: what was written is not what was planned.
    """
    layers = find_layers(inputs.model.path)
    if inputs.recipe.quantized and not is_covered(inputs.model.path):
        case = OutsideCase(inputs.model.path, inputs.recipe, inputs.calibration, inputs.config)
        return quantize_uncovered(case, workspace, progress=progress)
    if not inputs.recipe.quantized:
        return _skipped(inputs, layers)
    for name in inputs.recipe.formats:
        require_fit(layers.linears, name)
    tried = try_if_long(inputs.model.path, inputs.recipe, inputs.config, workspace, progress=progress)
    sensitivity = shared_sensitivity(inputs, store, progress=progress).artifact
    by_layer = {layer.layer: layer for layer in sensitivity.layers}
    rules, decisions = group_rules(layers, inputs.recipe, inputs.config, by_layer)
    chosen = repair(rules, inputs.rejected, by_layer) if inputs.rejected else _chosen(inputs, rules, by_layer, store, progress)
    chosen = keep_kl_budget(chosen, rules, sensitivity, inputs.config.kl_budget_nats)
    plan = chosen.formats
    refuse_experts(plan)
    flags, suspected = suspects(plan, by_layer, inputs.config.cosine_floor)
    folded = _folded(inputs, plan, store, progress)
    unreached, trained = _write(_instead(inputs, folded.model), plan, workspace, store, progress)
    tied = bool(read_config(folded.model.path).tie_word_embeddings)
    coverage = measure_coverage(folded.model.path, workspace / CHECKPOINT, layers.linears, plan, tied)
    require_coverage(coverage, plan)
    reasons = chosen.reasons | dict.fromkeys(unreached, REASON)
    layer_plans = tuple(_layer_plan(layer, plan[layer.name], by_layer, flags, reasons) for layer in layers.linears)
    predicted = sensitivity.total_kl_nats(sum(layer.predicted_kl_nats for layer in layer_plans))
    return QuantizedModel(
        recipe=inputs.recipe,
        checkpoint=CHECKPOINT,
        plan=layer_plans,
        coverage=coverage,
        predicted_kl_nats=predicted,
        raised=chosen.raised,
        calibration=sensitivity.calibration,
        files=file_refs(workspace, workspace / CHECKPOINT),
        measures=_measures(inputs, layers, coverage, predicted, sensitivity.num_tokens),
        decisions=(
            *(*tried, *decisions, *chosen.decisions, *suspected),
            *(*folded.decisions, *trained, *_calibration_decisions(sensitivity)),
        ),
        warnings=(
            *(*sensitivity.warnings, *folded.warnings),
            *(*unreached_warnings(unreached), *unseen_warnings(sensitivity.layers), *loader_warnings(layers, plan)),
        ),
    )


def _chosen(
    inputs: QuantizeInputs,
    rules: tuple[GroupRule, ...],
    sensitivity: dict[str, LayerSensitivity],
    store: Store,
    progress: Progress,
) -> Planned:
    """Return the best mix within the budget; where plain rounding does much harm, after a second look at it."""
    first = choose(rules, inputs.recipe, sensitivity)
    looks = inputs.recipe.bits_budget is not None and inputs.recipe.method in LOOKED_AT and inputs.config.reallocation_sequences
    if not looks or first.damage_nats < LEAST_NATS:
        return planned(rules, inputs.recipe, first)
    slopes = shared_slopes(inputs, rules, planned(rules, inputs.recipe, first).formats, store, progress).artifact
    read = weight_reader(inputs.model.path, tuple(layer for rule in rules for layer in rule.layers))
    second, decision = reallocate(rules, first, slopes, sensitivity, read)
    return planned(rules, inputs.recipe, second, decision)


def _instead(inputs: QuantizeInputs, model: Tree) -> QuantizeInputs:
    """Return the inputs with another model in the place of the source."""
    return inputs.model_copy(update={"model": model})


def _folded(inputs: QuantizeInputs, plan: dict[str, str], store: Store, progress: Progress) -> Folded:
    """Return what is rounded in place of the source: the source itself, or an equivalent model that rounds better."""
    wanted = TransformInputs.of(inputs.fingerprint, inputs.model, inputs.calibration, plan, inputs.config)

    def moments(model: Tree) -> Stored[Moments]:
        return shared_moments(_instead(inputs, model), store, progress=progress)

    return fold_all(wanted, transforms_of(inputs.recipe.method, inputs.config.rotation), store, moments, progress)


def _write(
    inputs: QuantizeInputs, plan: dict[str, str], workspace: Path, store: Store, progress: Progress
) -> tuple[tuple[str, ...], tuple[Decision, ...]]:
    """Quantize into parts that survive a kill, train scales if asked to, assemble the checkpoint, drop the parts.

    Returns the layers that no input reached, and what training did.
    """
    parts = Parts(workspace / PARTS)
    method, model = METHODS.get(inputs.recipe.method), inputs.model.path
    unreached: tuple[str, ...] = ()
    tuned: tuple[Decision, ...] = ()
    if inputs.recipe.method == SIGNROUND:
        tuning = Tuning.of(inputs.config, inputs.calibration, model, plan, parts)
        announce(tuning.walk, tuning.num_passes, progress)
        tune_along(tuning, workspace, progress)
        tuned = (decision(tuning),)
    elif method.needs_moments and inputs.config.error_propagation == "inputs":
        walk = plan_walk(model, inputs.calibration, inputs.config.moments_sequences, inputs.config.moments_tokens)
        announce(walk, PASSES_ALONG, progress)
        unreached = quantize_along(Propagation(walk, plan, method, parts), workspace, progress)
    else:
        unreached = _round_apart(inputs, plan, parts, store, progress)
    ranges = shared_ranges(inputs, store, progress=progress) if needs_ranges(plan) else None
    distillation = Distillation.of(inputs.config, inputs.calibration, model, plan, parts)
    final, trained = distill(distillation, workspace, progress=progress)

    def quantized(layer: str) -> QuantizedTensor:
        tensor = final.read(layer, plan[layer])
        assert tensor is not None, f"the part of {layer} vanished while the checkpoint was assembled"
        if ranges is None or FORMATS.get(plan[layer]).activation != "static-tensor":
            return tensor
        return replace(tensor, input_scale=input_step(ranges.artifact, layer, plan[layer]))

    routers = dict.fromkeys(read_layers(model).routers, FULL_PRECISION)
    write_checkpoint(model, workspace / CHECKPOINT, plan | routers, quantized)
    parts.remove()
    forget(workspace)
    return unreached, (*tuned, *trained, *((range_decision(ranges.artifact),) if ranges else ()))


def _round_apart(inputs: QuantizeInputs, plan: dict[str, str], parts: Parts, store: Store, progress: Progress) -> tuple[str, ...]:
    """Quantize every layer by itself, from its weight and, where the method needs it, its moment in the full model."""
    linears, device = read_layers(inputs.model.path).linears, walking_device()
    method, read = METHODS.get(inputs.recipe.method), weight_reader(inputs.model.path, linears)
    moments = shared_moments(inputs, store, progress=progress) if method.needs_moments else None

    def of_group(leader: str, weight_OI: torch.Tensor, weight_format: WeightFormat) -> QuantizedTensor:
        if moments is None:
            return method.quantize(weight_OI, weight_format)
        moment_II = read_moment(moments.directory, moments.artifact, leader).to(device)
        return quantize_reached(method, weight_OI.to(device), weight_format, moment_II)

    layers = tuple(layer for layer in linears if FORMATS.get(plan[layer.name]).on_grid)
    groups = input_groups(layers)
    for group in progress.track(groups, "quantize", len(groups)):
        for format_name, alike_layers in alike(group, plan):
            finish(parts, alike_layers, format_name, read, of_group)
    planned_names = {layer.name for layer in layers}
    return tuple(name for name in moments.artifact.unreached if name in planned_names) if moments else ()


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


def _mends(inputs: QuantizeInputs) -> bool:
    """Return whether more than plain rounding is done, which the prediction knows nothing of."""
    folds = transforms_of(inputs.recipe.method, inputs.config.rotation)
    return inputs.recipe.method != "rtn" or bool(folds) or inputs.config.distill_steps > 0


def _measures(
    inputs: QuantizeInputs, layers: ModelLayers, coverage: Coverage, predicted_kl_nats: float, num_tokens: int | None
) -> tuple[Measure, ...]:
    """Return size, true bits, coverage and predicted KL; `num_tokens` is what the prediction rests on."""
    guess = UPPER_GUESS if inputs.recipe.quantized and _mends(inputs) else ""
    guess += INPUTS_NOTE if rounds_inputs(asked_formats(inputs.recipe, inputs.config)) else ""
    return (
        *size_measures(inputs.model.path, layers, coverage),
        Measure(
            name="predicted_kl",
            dimension=Dimension.ACCURACY,
            unit="nats",
            value=predicted_kl_nats,
            baseline=0.0,
            origin=Origin.PREDICTED,
            num_samples=num_tokens,
            reason=f"half the Fisher-weighted squared rounding error per token, summed over layers with their growth{guess}",
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
