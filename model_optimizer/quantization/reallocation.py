"""A second look at a mix of few bits: what one more change of each layer would do there, and the best set of changes.

The sensitivity pass sees one layer at a time around the full model. In a mix the errors of layers add up or cancel, which
the gradient g of KL(original || mix) tells. Taking layer n from its format c to f is worth

    value = 1/2 <g_n, W_f - W_c> + r (D_f + D_c),   r = |W_f - W_c|^2 / (|W_f - W|^2 + |W_c - W|^2)

with D the predicted damages: the second term stands for 1/2 (W_f - W_c)^T F (W_f - W_c), for errors of two roundings hardly
correlate, and r takes out what they share. Staying is worth 0, so the exact allocation of these values never expects a loss.

Only plain rounding is worth the look, for the slopes see its very errors. GPTQ and learned rounding leave others; the figures
stand in docs/decisions/0008.

The half in front of the slope keeps many changes at once from overshooting: each pair of layers is in both slopes, and the new
errors are fresh. Source: SmolLM2-135M, plans judged on 60,672 tokens of wikitext2-test, KL as a share of that of the
leave-one-out optimum at 3.5, 4.25, 5 and 6 bits: before 1.080, 1.002, 1.009, 0.991; after 16 pieces of 256 tokens 0.921, 0.897,
0.947, 0.989; after 64 pieces 0.893, 0.934, 0.961, 0.991. The whole slope (128 pieces) made it worse: 2.53, 1.29, 1.19, 1.08.
So did a second round.

Shape letters: B sequences, T tokens of one sequence, V vocabulary, O output features, I input features, F formats.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from transformers import PreTrainedModel

from model_optimizer.artifacts.base import Frozen, StageInputs, Tree
from model_optimizer.artifacts.quantized import LayerSensitivity
from model_optimizer.artifacts.reallocation import MixSlopes
from model_optimizer.decisions import Decision
from model_optimizer.disk import explained
from model_optimizer.formats.registry import FORMATS
from model_optimizer.journal import Journal
from model_optimizer.protocols import Progress
from model_optimizer.quantization.allocation import Allocation, Option, frontier
from model_optimizer.quantization.breaker import GroupRule, damage_of
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.layers import read_layers, weight_reader
from model_optimizer.quantization.linear_models import load_linear
from model_optimizer.quantization.rounding_errors import RoundingErrors, rounding_errors
from model_optimizer.quantization.sensitivity import BATCH_TOKENS, batches, pieces
from model_optimizer.quantization.sequence_gradients import padded, projections, visit_objective
from model_optimizer.store import stage_key

KIND = "mix_slopes"
STATE = "slopes.jsonl"
ORIGINAL = "original"
LABEL = "second look at the mix"
SLOPE_SHARE = 0.5
LOOKED_AT = frozenset({"rtn"})
"""Methods whose mix gets a second look."""
LEAST_NATS = 0.03
"""Predicted damage from which a mix is worth a second look. Source: the figures above; at 6 bits (0.025) little was gained."""


class SlopesInputs(StageInputs):
    """Everything that the slopes at a mix depend on."""

    model: Tree
    calibration: CalibrationSource
    plan: dict[str, str]
    """Layer -> its present format."""
    formats: dict[str, tuple[str, ...]]
    """Layer -> the formats that it may get."""
    num_sequences: int
    max_tokens: int


class Slopes(Frozen):
    """Sums over the sequences of one batch: one journal record."""

    num_sequences: int
    num_tokens: int
    kl_nats: float
    slope_nats: dict[str, dict[str, float]]


def measure_slopes(inputs: SlopesInputs, workspace: Path, *, progress: Progress) -> MixSlopes:
    """Return the slopes of KL at the mix: per batch one forward of the original, then one forward and one backward of the mix.

    One copy of the weights is in memory: what the original predicts waits on disk until the weights have been rounded.

    Raises:
        ConfigError: no usable calibration sample.
        UnsupportedError: a layer does not see its tokens sequence by sequence.
    """
    prepared = prepare(inputs.calibration, inputs.model.path)
    sequences = pieces(prepared.samples, inputs.num_sequences, inputs.max_tokens)
    model = load_linear(inputs.model.path).requires_grad_(False)
    if torch.cuda.is_available():
        torch.nn.Module.to(model, torch.device("cuda"))
    journal = Journal(workspace / STATE, stage_key(inputs), Slopes)
    done = sum(record.num_sequences for record in journal.records)
    ranges = list(batches(sequences, done, BATCH_TOKENS[model.device.type]))
    wanted = tuple(sorted({*inputs.plan.values(), *(name for names in inputs.formats.values() for name in names)}))
    linears = tuple(layer for layer in read_layers(inputs.model.path).linears if layer.name in inputs.plan)
    read, num_weights = weight_reader(inputs.model.path, linears), sum(layer.num_weights for layer in linears)
    with (
        rounding_errors(lambda layer: read(layer).to(model.device), wanted, workspace, num_weights) as errors,
        _Predictions(workspace / ORIGINAL) as predictions,
    ):
        for number, (first, last) in enumerate(progress.track(ranges, "what the original predicts", len(ranges))):
            predictions.write(number, model, sequences[first:last])
        mix = _Mix(model, inputs.plan, errors)
        for number, (first, last) in enumerate(progress.track(ranges, LABEL, len(ranges))):
            journal.append(mix.slopes(sequences[first:last], predictions.read(number, model.device), inputs.formats))
    num_tokens = sum(record.num_tokens for record in journal.records)
    total = {
        layer: {name: sum(it.slope_nats[layer][name] for it in journal.records) / num_tokens for name in names}
        for layer, names in inputs.formats.items()
    }
    kl_nats = sum(record.kl_nats for record in journal.records) / num_tokens
    journal.path.unlink()
    return MixSlopes(slope_nats=total, kl_nats=kl_nats, num_tokens=num_tokens, warnings=prepared.warnings)


@dataclass(frozen=True, slots=True)
class _Predictions:
    """Log-probabilities [B, T, V] of batches, in files that go when the body ends."""

    folder: Path

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @torch.no_grad()
    def write(self, number: int, model: PreTrainedModel, sequences: tuple[tuple[int, ...], ...]) -> None:
        """Keep what a model predicts for some sequences."""
        tokens_BT, _ = padded(sequences, model.device)
        log_probs_BTV = torch.log_softmax(model(input_ids=tokens_BT, use_cache=False).logits.float(), -1)
        with explained(self.folder):
            np.save(self.folder / f"{number}.npy", log_probs_BTV.cpu().numpy(), allow_pickle=False)

    def read(self, number: int, device: torch.device) -> torch.Tensor:
        """Return what was kept."""
        return torch.from_numpy(np.load(self.folder / f"{number}.npy", allow_pickle=False)).to(device)


class _Mix:
    """A model whose planned layers are rounded in place."""

    def __init__(self, model: PreTrainedModel, plan: Mapping[str, str], errors: RoundingErrors):
        self._model, self._plan, self._errors = model, plan, errors
        for layer, name in plan.items():
            weight_OI = model.get_parameter(f"{layer}.weight").data
            weight_OI.copy_(FORMATS.get(name).round_trip(weight_OI))

    def slopes(
        self, sequences: tuple[tuple[int, ...], ...], log_probs_BTV: torch.Tensor, formats: Mapping[str, tuple[str, ...]]
    ) -> Slopes:
        """Return the summed KL of some sequences and its slope towards every allowed format."""
        found: dict[str, dict[str, float]] = {}
        divergence = _Divergence(log_probs_BTV)

        def consume(layer: str, gradient_BOI: torch.Tensor) -> None:
            rows_FBO = projections(gradient_BOI.sum(0, keepdim=True), self._errors.of(layer))
            towards = dict(zip(self._errors.formats, rows_FBO.sum((1, 2), dtype=torch.float64).tolist(), strict=True))
            found[layer] = {name: towards[name] - towards[self._plan[layer]] for name in formats[layer]}

        visit_objective(self._model, tuple(formats), sequences, divergence, consume)
        num_tokens = sum(map(len, sequences))
        return Slopes(num_sequences=len(sequences), num_tokens=num_tokens, kl_nats=divergence.nats, slope_nats=found)


class _Divergence:
    """KL of predictions from the original's, summed over tokens; remembers the last."""

    def __init__(self, log_probs_BTV: torch.Tensor):
        self._log_probs_BTV = log_probs_BTV
        self.nats = 0.0

    def __call__(self, logits_BTV: torch.Tensor, is_token_BT: torch.Tensor) -> torch.Tensor:
        change_BTV = self._log_probs_BTV - torch.log_softmax(logits_BTV.float(), -1)
        kl = ((self._log_probs_BTV.exp() * change_BTV).sum(-1) * is_token_BT).sum()
        self.nats = float(kl.detach())
        return kl


def reallocate(
    rules: tuple[GroupRule, ...],
    present: Allocation,
    slopes: MixSlopes,
    sensitivity: Mapping[str, LayerSensitivity],
    weight_of: Callable[[str], torch.Tensor],
) -> tuple[Allocation, Decision]:
    """Return the best set of changes that keeps within the bytes of `present`, and what is expected of it.

    `weight_of(layer)` gives a layer's original weight [O, I]. The allocation's `damage_nats` is the sum of the values:
    the expected change of KL, at most 0.
    """
    options = tuple(
        tuple(_option(rule, name, now, slopes, sensitivity, distances) for name in rule.formats)
        for rule, now in zip(rules, present.formats, strict=True)
        for distances in (_distances(rule, now, weight_of),)
    )
    found = frontier(options).within_bytes(present.num_bytes)
    num_changed = sum(len(rule.layers) for rule, a, b in zip(rules, found.formats, present.formats, strict=True) if a != b)
    decision = Decision(
        subject=LABEL,
        choice=f"{num_changed} layers change their format within the same bytes",
        because="the gradient of KL at the mix tells which errors add up and which cancel",
        numbers={
            "num_layers": num_changed,
            "expected_change_nats": found.damage_nats,
            "calibration_kl_nats": slopes.kl_nats,
            "num_tokens": slopes.num_tokens,
        },
    )
    return found, decision


def _option(
    rule: GroupRule,
    name: str,
    now: str,
    slopes: MixSlopes,
    sensitivity: Mapping[str, LayerSensitivity],
    distances: Mapping[str, Mapping[str, float]],
) -> Option:
    num_bytes = sum(FORMATS.get(name).num_bytes(layer.out_features, layer.in_features) for layer in rule.layers)
    value = 0.0
    for layer in rule.layers if name != now else ():
        damage = sum(damage_of(sensitivity[layer.name], it) for it in (name, now))
        value += SLOPE_SHARE * slopes.slope_nats[layer.name][name] + distances[layer.name][name] * damage
    return Option(name, num_bytes, value)


def _distances(rule: GroupRule, now: str, weight_of: Callable[[str], torch.Tensor]) -> dict[str, dict[str, float]]:
    """Return r of every layer and format: 1 where the two roundings err apart, 0 where they err alike."""
    found = {}
    for layer in rule.layers if len(rule.formats) > 1 else ():
        weight_OI = weight_of(layer.name).float()
        here_OI = FORMATS.get(now).round_trip(weight_OI) - weight_OI
        found[layer.name] = {
            name: _distance(FORMATS.get(name).round_trip(weight_OI) - weight_OI, here_OI) for name in rule.formats
        }
    return found


def _distance(there_OI: torch.Tensor, here_OI: torch.Tensor) -> float:
    both = float(there_OI.square().sum(dtype=torch.float64) + here_OI.square().sum(dtype=torch.float64))
    return float((there_OI - here_OI).square().sum(dtype=torch.float64)) / both if both else 0.0
