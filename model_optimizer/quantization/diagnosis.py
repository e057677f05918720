"""Which layers of a quantized checkpoint do harm, against its original: predicted for all, measured for the worst.

Works on any checkpoint that this project writes, whatever method made it: the errors are those of the stored weights.

    predicted = mean over sequences of sum_O (sum_I G dW)^2 / (2 T)    as in sensitivity.py, by rows
    cosine    = cos(X W^T, X Wq^T) over all tokens,   SNR = 10 log10(|W|^2 / |dW|^2)

Shape letters: B sequences, O output features, I input features, T tokens, N all tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import ConfigError
from model_optimizer.formats.compressed_tensors import read_plan
from model_optimizer.protocols import Progress
from model_optimizer.quantization.layers import find_layers
from model_optimizer.quantization.linear_models import load_linear
from model_optimizer.quantization.logits_kl import kl_nats
from model_optimizer.quantization.sequence_gradients import projections, visit_gradients


class LayerDiagnosis(Frozen):
    """What storing one layer as it is stored does."""

    layer: str
    format: str
    predicted_kl_nats: float
    measured_kl_nats: float | None
    """KL of the final logits with this layer alone quantized; None where it was not measured."""
    output_cosine: float
    snr_db: float
    weight_std: float
    weight_absmax: float
    suspect: bool
    """Cosine below the floor."""


@dataclass(frozen=True, slots=True)
class _Case:
    """The original model, the stored errors of its quantized layers, and the text."""

    model: PreTrainedModel
    plan: dict[str, str]
    errors_OI: dict[str, torch.Tensor]
    sequences: Sequence[tuple[int, ...]]


def diagnose(
    original: Path,
    quantized: Path,
    sequences: Sequence[tuple[int, ...]],
    *,
    cosine_floor: float,
    num_measured: int,
    progress: Progress,
) -> tuple[LayerDiagnosis, ...]:
    """Return every quantized layer, suspects first and then by predicted KL; the `num_measured` first of them measured.

    Raises:
        ConfigError: the checkpoint holds no quantized layer, or layers that the original has not.
    """
    case = _read(original, quantized, sequences)
    cosines = _cosines(case)
    predicted = _predict(case, progress)
    order = sorted(case.plan, key=lambda name: (cosines[name] >= cosine_floor, -predicted[name]))
    measured = {name: _measure(case, name) for name in progress.track(order[:num_measured], "measure", num_measured)}
    found = []
    for name in order:
        weight_OI = case.model.get_parameter(f"{name}.weight")
        noise = case.errors_OI[name].square().sum(dtype=torch.float64).item()
        signal = weight_OI.square().sum(dtype=torch.float64).item()
        found.append(
            LayerDiagnosis(
                layer=name,
                format=case.plan[name],
                predicted_kl_nats=predicted[name],
                measured_kl_nats=measured.get(name),
                output_cosine=cosines[name],
                snr_db=10 * math.log10(signal / noise) if signal and noise else math.inf,
                weight_std=weight_OI.std(correction=0).item(),
                weight_absmax=weight_OI.abs().max().item(),
                suspect=cosines[name] < cosine_floor,
            )
        )
    return tuple(found)


def _read(original: Path, quantized: Path, sequences: Sequence[tuple[int, ...]]) -> _Case:
    plan = read_plan(quantized)
    if not plan:
        raise ConfigError(f"{quantized} holds no quantized layer; give a checkpoint that was made by quantize or a run")
    known = {layer.name for layer in find_layers(original).linears}
    if strange := sorted(plan.keys() - known):
        raise ConfigError(f"{quantized} quantizes {strange[0]}, which {original} has not; give the model that it was made from")
    model, changed = (load_linear(path).requires_grad_(False) for path in (original, quantized))
    weights = {name: (model.get_parameter(f"{name}.weight"), changed.get_parameter(f"{name}.weight")) for name in plan}
    for name, (weight_OI, stored_OI) in weights.items():
        if weight_OI.shape != stored_OI.shape:
            raise ConfigError(f"{name} is {tuple(weight_OI.shape)} in {original} and {tuple(stored_OI.shape)} in {quantized}")
    return _Case(model, plan, {name: (stored - weight).detach() for name, (weight, stored) in weights.items()}, sequences)


def _predict(case: _Case, progress: Progress) -> dict[str, float]:
    sums = dict.fromkeys(case.plan, 0.0)

    def consume(name: str, gradient_BOI: torch.Tensor) -> None:
        rows_FBO = projections(gradient_BOI, case.errors_OI[name][..., None])
        sums[name] += rows_FBO.square().sum(dtype=torch.float64).item()

    for seed, sequence in enumerate(progress.track(case.sequences, "sensitivity", len(case.sequences))):
        visit_gradients(case.model, tuple(case.plan), (sequence,), (seed,), consume)
    num_tokens = sum(map(len, case.sequences))
    return {name: value / (2 * num_tokens) for name, value in sums.items()}


@torch.no_grad()
def _cosines(case: _Case) -> dict[str, float]:
    """Return the cosine between a layer's outputs before and after, all tokens taken as one vector; 1 where both are zero."""
    products = {name: torch.zeros(3, dtype=torch.float64) for name in case.plan}

    def collect(name: str, inputs_NI: torch.Tensor) -> None:
        before_NO = inputs_NI @ case.model.get_parameter(f"{name}.weight").T
        after_NO = before_NO + inputs_NI @ case.errors_OI[name].T
        pairs = ((before_NO, after_NO), (before_NO, before_NO), (after_NO, after_NO))
        products[name] += torch.stack([(left * right).sum(dtype=torch.float64) for left, right in pairs])

    handles = [
        case.model.get_submodule(name).register_forward_pre_hook(
            lambda _, arguments, name=name: collect(name, arguments[0].flatten(0, -2))
        )
        for name in case.plan
    ]
    for sequence in case.sequences:
        case.model(input_ids=torch.tensor([sequence]), use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: _cosine(it) for name, it in products.items()}


def _cosine(products: torch.Tensor) -> float:
    cross, before, after = products.tolist()
    return float(cross / math.sqrt(before * after)) if before > 0 and after > 0 else float(before == after)


@torch.no_grad()
def _measure(case: _Case, name: str) -> float:
    """Return the mean KL of the final logits with one layer alone as it is stored."""
    weight_OI = case.model.get_parameter(f"{name}.weight")
    original_OI, found = weight_OI.clone(), []
    for sequence in case.sequences:
        tokens_BT = torch.tensor([sequence])
        reference_TV = case.model(input_ids=tokens_BT, use_cache=False).logits[0]
        weight_OI.add_(case.errors_OI[name])
        found.append(kl_nats(reference_TV, case.model(input_ids=tokens_BT, use_cache=False).logits[0]))
        weight_OI.copy_(original_OI)
    return torch.cat(found).mean().item()


def summary(layers: Sequence[LayerDiagnosis]) -> Mapping[str, float]:
    """Return what the layers come to together."""
    return {
        "num_layers": len(layers),
        "num_suspects": sum(layer.suspect for layer in layers),
        "predicted_kl_nats": sum(layer.predicted_kl_nats for layer in layers),
    }
