"""How much each layer's rounding would hurt, for every format at once, from one calibrated pass.

A weight change dW moves the logits' distribution by about KL = 1/2 dW^T F dW with F the Fisher information, of which
every sequence gives one sample: the gradient G of its log-likelihood under labels drawn from the model itself. Summing
over a sequence before squaring keeps what its tokens share. Two estimates of a layer's KL per token are mixed:

    quadratic = mean over sequences of (sum_OI G dW)^2 / (2 T)            exact in the mean, but one draw per sequence
    by rows   = mean over sequences of sum_O (sum_I G dW)^2 / (2 T)       steadier, but blind to what rows share
    predicted = w quadratic + (1 - w) by rows,  w = n / (n + 2 / ROW_ERROR^2)   for n sequences

All layers together do more harm than the sum S of their figures, once it is large: KL = S exp(growth S), with S in the
exponent up to MOST_GROWTH_NATS. The growth is measured on one plan, every layer in the same small format, over a few sequences.

The pass is journalled per batch of sequences; a killed one continues and ends with the same numbers.

Shape letters: B sequences, O output features, I input features, T tokens of one sequence, V vocabulary, N all tokens.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from model_optimizer.artifacts.base import Frozen, StageInputs, Tree
from model_optimizer.artifacts.quantized import MOST_GROWTH_NATS, LayerSensitivity, Sensitivity
from model_optimizer.formats.registry import FORMATS
from model_optimizer.journal import Journal
from model_optimizer.protocols import Progress
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.layers import read_layers, require_fit
from model_optimizer.quantization.linear_models import load_linear
from model_optimizer.quantization.logits_kl import kl_nats
from model_optimizer.quantization.rounding_errors import RoundingErrors, rounding_errors
from model_optimizer.quantization.sequence_gradients import projections, visit_gradients
from model_optimizer.store import stage_key

KIND = "sensitivity"
STATE = "sensitivity.jsonl"
BATCH_TOKENS = {"cpu": 256, "cuda": 16384}
"""Tokens of one backward pass. Activations and logits take most of the memory: 1.8 GB at 256 tokens of SmolLM2-135M, the
process and its weights included, 2.3 GB at 512; a CPU gains no time from more.
"""
ROW_ERROR_RATIO = 0.1
"""Typical error of the estimate by rows on an endless sample. Source: SmolLM2-135M against leave-one-out, 446 sequences."""
COSINE_TOKENS = 256
"""Tokens over which output cosines are taken; they settle far sooner than KL does."""
MIN_GROWTH_SEQUENCES, MAX_GROWTH_SEQUENCES = 4, 16
"""A sixteenth of the sequences within these bounds measures the growth: two forward passes over it."""
GROWTH_AT_NATS = 1.0
"""The growth is measured in the format whose sum comes closest to this; it does not matter for much smaller sums."""
LEAST_GROWTH_NATS = 0.1
"""Below this sum in every format the growth cannot be told from noise and is taken to be 0."""


class SensitivityInputs(StageInputs):
    """Everything that the pass reads. Free of any recipe, so that all recipes of a model share one result."""

    model: Tree
    calibration: CalibrationSource
    formats: tuple[str, ...]
    num_sequences: int
    max_tokens: int
    seed: int


class Squares(Frozen):
    """Sums over the sequences of one batch, by layer and format: one journal record."""

    num_sequences: int
    num_tokens: int
    quadratic: dict[str, dict[str, float]]
    by_rows: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the calibrated pass runs over."""

    model: PreTrainedModel
    weights_OI: dict[str, torch.Tensor]
    errors: RoundingErrors
    formats: tuple[str, ...]
    sequences: tuple[tuple[int, ...], ...]
    seed: int


def measure_sensitivity(inputs: SensitivityInputs, workspace: Path, *, progress: Progress) -> Sensitivity:
    """Return the predicted KL and the output cosine of every linear layer in every format; on the GPU where there is one.

    Raises:
        UnsupportedError: a format does not fit some layer, or the architecture is not covered.
        ConfigError: no usable calibration sample.
    """
    layers = read_layers(inputs.model.path).linears
    for name in inputs.formats:
        require_fit(layers, name)
    prepared = prepare(inputs.calibration, inputs.model.path)
    sequences = pieces(prepared.samples, inputs.num_sequences, inputs.max_tokens)
    model = load_linear(inputs.model.path).requires_grad_(False)
    if torch.cuda.is_available():
        torch.nn.Module.to(model, torch.device("cuda"))
    weights_OI = {layer.name: model.get_parameter(f"{layer.name}.weight").detach() for layer in layers}
    variances = {name: weight_OI.var(correction=0).item() for name, weight_OI in weights_OI.items()}
    journal = Journal(workspace / STATE, stage_key(inputs), Squares)
    num_weights = sum(layer.num_weights for layer in layers)
    with rounding_errors(weights_OI.__getitem__, inputs.formats, workspace, num_weights) as errors:
        run = _Pass(model, weights_OI, errors, inputs.formats, sequences, inputs.seed)
        cosines = _output_cosines(run)
        _accumulate(run, journal, progress)
        predicted = _predict(journal.records, tuple(weights_OI), inputs.formats)
        growth = _measure_growth(run, predicted)
    journal.path.unlink()
    return Sensitivity(
        layers=tuple(
            LayerSensitivity(
                layer=layer.name,
                num_weights=layer.num_weights,
                predicted_kl_nats=predicted[layer.name],
                output_cosine=cosines[layer.name],
                weight_variance=variances[layer.name],
            )
            for layer in layers
        ),
        calibration=prepared.report,
        num_tokens=sum(map(len, sequences)),
        seed=inputs.seed,
        growth_per_nat=growth,
        warnings=prepared.warnings,
    )


def _accumulate(run: _Pass, journal: Journal[Squares], progress: Progress) -> None:
    """Run one forward and one backward per batch of sequences that the journal does not hold yet."""
    done = sum(record.num_sequences for record in journal.records)
    ranges = list(batches(run.sequences, done, BATCH_TOKENS[run.model.device.type]))
    for first, last in progress.track(ranges, "sensitivity", len(ranges)):
        journal.append(_square(run, first, last))


def _square(run: _Pass, first: int, last: int) -> Squares:
    """Return the sums of one batch of sequences."""
    quadratic: dict[str, dict[str, float]] = {}
    by_rows: dict[str, dict[str, float]] = {}

    def consume(name: str, gradient_BOI: torch.Tensor) -> None:
        rows_FBO = projections(gradient_BOI, run.errors.of(name))
        together_F = rows_FBO.sum(-1).square().sum(-1, dtype=torch.float64).tolist()
        apart_F = rows_FBO.square().sum((-1, -2), dtype=torch.float64).tolist()
        quadratic[name] = dict(zip(run.formats, together_F, strict=True))
        by_rows[name] = dict(zip(run.formats, apart_F, strict=True))

    sequences = run.sequences[first:last]
    seeds = [run.seed * 1_000_003 + index for index in range(first, last)]
    visit_gradients(run.model, tuple(run.weights_OI), sequences, seeds, consume)
    num_tokens = sum(map(len, sequences))
    return Squares(num_sequences=last - first, num_tokens=num_tokens, quadratic=quadratic, by_rows=by_rows)


def pieces(samples: tuple[tuple[int, ...], ...], count: int, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return up to `count` pieces of at most `max_tokens` tokens: the beginning of every sample, then what follows it, and so on.

    What remains of a sample is a piece if it is half as long as allowed, so that short rests do not stand for a sequence.
    """
    found: list[tuple[int, ...]] = []
    for start in range(0, max(map(len, samples)), max_tokens):
        later = (sample[start : start + max_tokens] for sample in samples)
        found += [piece for piece in later if piece and (start == 0 or 2 * len(piece) >= max_tokens)]
    return tuple(found[:count])


def batches(sequences: tuple[tuple[int, ...], ...], first: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of sequences from `first` on that have at most `num_tokens` tokens when padded to equal length."""
    while first < len(sequences):
        last, longest = first, 0
        while last < len(sequences):
            longest = max(longest, len(sequences[last]))
            if last > first and longest * (last + 1 - first) > num_tokens:
                break
            last += 1
        yield first, last
        first = last


def _predict(records: list[Squares], layers: tuple[str, ...], formats: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Mix the two estimates in proportion to what each is worth at this number of sequences."""
    num_sequences = sum(record.num_sequences for record in records)
    num_tokens = sum(record.num_tokens for record in records)
    share = num_sequences / (num_sequences + 2 / ROW_ERROR_RATIO**2)
    return {
        layer: {
            name: sum(share * it.quadratic[layer][name] + (1 - share) * it.by_rows[layer][name] for it in records)
            / (2 * num_tokens)
            for name in formats
        }
        for layer in layers
    }


@torch.no_grad()
def _measure_growth(run: _Pass, predicted: Mapping[str, Mapping[str, float]]) -> float:
    """Return `growth` of KL = S exp(growth S); leaves the model's weights rounded."""
    sums = {name: sum(layer[name] for layer in predicted.values()) for name in run.formats}
    name = min(sums, key=lambda it: abs(math.log(max(sums[it], 1e-12) / GROWTH_AT_NATS)))
    if sums[name] < LEAST_GROWTH_NATS:
        return 0.0
    count = min(MAX_GROWTH_SEQUENCES, max(MIN_GROWTH_SEQUENCES, len(run.sequences) // 16))
    tokens = [torch.tensor([sequence], device=run.model.device) for sequence in run.sequences[:count]]
    references = [run.model(input_ids=it, use_cache=False).logits[0] for it in tokens]
    for weight_OI in run.weights_OI.values():
        weight_OI.copy_(FORMATS.get(name).round_trip(weight_OI))
    changed = [run.model(input_ids=it, use_cache=False).logits[0] for it in tokens]
    kl_N = torch.cat([kl_nats(reference_TV, logits_TV) for reference_TV, logits_TV in zip(references, changed, strict=True)])
    return math.log(kl_N.mean().item() / sums[name]) / min(sums[name], MOST_GROWTH_NATS)


@torch.no_grad()
def _output_cosines(run: _Pass) -> dict[str, dict[str, float]]:
    """Return cos(X W^T, X Wq^T) per layer and format over the first COSINE_TOKENS calibration tokens.

    The outputs of all tokens of a layer are compared as one vector; the bias is left out. A layer whose
    outputs are all zero counts as unharmed. Inputs are collected first, so that each weight is rounded once per format.
    """
    names = tuple(run.weights_OI)
    inputs_NI: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def collect(arguments: tuple[torch.Tensor, ...], name: str) -> None:
        inputs_NI[name].append(arguments[0].flatten(0, -2))

    handles = [
        run.model.get_submodule(name).register_forward_pre_hook(lambda _, arguments, name=name: collect(arguments, name))
        for name in names
    ]
    for tokens in _leading(run.sequences, COSINE_TOKENS):
        run.model(input_ids=torch.tensor([tokens], device=run.model.device), use_cache=False)
    for handle in handles:
        handle.remove()
    found = {}
    for name in names:
        seen_NI, errors_OIF = torch.cat(inputs_NI.pop(name)), run.errors.of(name)
        outputs_NO = seen_NI @ run.weights_OI[name].T
        rounded = zip(run.formats, errors_OIF.unbind(-1), strict=True)
        found[name] = {it: _cosine(outputs_NO, outputs_NO + seen_NI @ error_OI.T) for it, error_OI in rounded}
    return found


def _cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    cross, left_square, right_square = (
        (a * b).sum(dtype=torch.float64).item() for a, b in ((left, right), (left, left), (right, right))
    )
    if left_square > 0 and right_square > 0:
        return float(cross / (left_square * right_square) ** 0.5)
    return float(left_square == right_square)


def _leading(sequences: tuple[tuple[int, ...], ...], num_tokens: int) -> Iterable[tuple[int, ...]]:
    """Yield leading parts of the sequences until `num_tokens` tokens have been given."""
    for tokens in sequences:
        if num_tokens <= 0:
            return
        yield tokens[:num_tokens]
        num_tokens -= len(tokens)
