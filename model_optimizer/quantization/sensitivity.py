"""How much each layer's rounding would hurt, for every format at once, from one calibrated pass.

A weight change dW moves the logits' distribution by about KL = 1/2 dW^T F dW with F the Fisher information. Its
diagonal is estimated from gradients of whole sequences whose labels are sampled from the model itself (the true
Fisher, not the empirical one): summing over a sequence before squaring keeps what its tokens share.

    predicted_kl_nats(layer, format) = sum(F_OI * dW_OI^2) / (2 * tokens),  F_OI = sum over sequences of g_OI^2

The pass is journalled per block of sequences; a killed one continues and ends with the same numbers.

Shape letters: O output features, I input features, T tokens of one sequence, V vocabulary, N all tokens.
"""

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from model_optimizer.artifacts.base import StageInputs, Tree
from model_optimizer.artifacts.quantized import LayerSensitivity, Sensitivity
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Progress
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.layers import read_layers, require_fit

log = logging.getLogger(__name__)

KIND = "sensitivity"
STATE = "fisher.safetensors"
BLOCK_SEQUENCES = 8
"""Sequences between two journal entries; an entry is as large as the linear weights."""
COSINE_TOKENS = 256
"""Tokens over which output cosines are taken; they settle far sooner than KL does."""


class SensitivityInputs(StageInputs):
    """Everything that the pass reads. Free of any recipe, so that all recipes of a model share one result."""

    model: Tree
    calibration: CalibrationSource
    formats: tuple[str, ...]
    num_sequences: int
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the calibrated pass runs over."""

    model: PreTrainedModel
    weights_OI: dict[str, torch.nn.Parameter]
    sequences: tuple[tuple[int, ...], ...]
    seed: int


@dataclass(slots=True)
class _Fisher:
    """The running sums; `num_done` sequences of `num_tokens` tokens are in them."""

    sums_OI: dict[str, torch.Tensor]
    num_done: int = 0
    num_tokens: int = 0


def measure_sensitivity(inputs: SensitivityInputs, workspace: Path, *, progress: Progress) -> Sensitivity:
    """Return the predicted KL and the output cosine of every linear layer in every format.

    Raises:
        UnsupportedError: a format does not fit some layer, or the architecture is not covered.
        ConfigError: no usable calibration sample.
    """
    layers = read_layers(inputs.model.path).linears
    for name in inputs.formats:
        require_fit(layers, name)
    prepared = prepare(inputs.calibration, inputs.model.path)
    sequences = tuple(tokens[: inputs.max_tokens] for tokens in prepared.samples[: inputs.num_sequences])
    model = load_dequantized(inputs.model.path)
    model.requires_grad_(False)
    weights_OI = {layer.name: model.get_parameter(f"{layer.name}.weight") for layer in layers}
    cosines = _output_cosines(model, tuple(weights_OI), inputs.formats, sequences)
    fisher = _accumulate(_Pass(model, weights_OI, sequences, inputs.seed), workspace / STATE, progress)
    measured = tuple(
        _judge(name, weight_OI.detach(), fisher, cosines[name])
        for name, weight_OI in progress.track(weights_OI.items(), "rounding")
    )
    (workspace / STATE).unlink(missing_ok=True)
    return Sensitivity(
        layers=measured,
        calibration=prepared.report,
        num_tokens=fisher.num_tokens,
        seed=inputs.seed,
        warnings=prepared.warnings,
    )


def _accumulate(run: _Pass, state: Path, progress: Progress) -> _Fisher:
    """Run one forward and one backward per sequence that the journal `state` does not hold yet."""
    zeros_OI = {name: torch.zeros_like(weight_OI.data) for name, weight_OI in run.weights_OI.items()}
    fisher = _resume(state, zeros_OI) or _Fisher(zeros_OI)
    handles = [_square_gradients_into(fisher.sums_OI[name], weight_OI) for name, weight_OI in run.weights_OI.items()]
    num_sequences = len(run.sequences)
    try:
        for index in progress.track(range(fisher.num_done, num_sequences), "sensitivity", num_sequences - fisher.num_done):
            _backward(run.model, run.sequences[index], seed=run.seed * 1_000_003 + index)
            fisher.num_done = index + 1
            fisher.num_tokens += len(run.sequences[index])
            if fisher.num_done % BLOCK_SEQUENCES == 0 and fisher.num_done < num_sequences:
                _save(state, fisher)
    finally:
        for handle in handles:
            handle.remove()
        run.model.requires_grad_(False)
    return fisher


def _square_gradients_into(sum_OI: torch.Tensor, weight_OI: torch.nn.Parameter) -> torch.utils.hooks.RemovableHandle:
    """Add the square of each new gradient to `sum_OI` and free it at once, so that gradients never pile up."""

    def fold(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        sum_OI.addcmul_(parameter.grad, parameter.grad)
        parameter.grad = None

    weight_OI.requires_grad_(True)
    handle: torch.utils.hooks.RemovableHandle = weight_OI.register_post_accumulate_grad_hook(fold)
    return handle


def _backward(model: PreTrainedModel, tokens: tuple[int, ...], seed: int) -> None:
    """Differentiate the summed log-likelihood of one draw of labels from the model's own prediction."""
    logits_TV = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    log_probs_TV = torch.log_softmax(logits_TV, dim=-1)
    generator = torch.Generator().manual_seed(seed)
    labels_T = torch.multinomial(log_probs_TV.detach().exp(), 1, generator=generator)
    log_probs_TV.gather(1, labels_T).sum().backward()


def _resume(state: Path, zeros_OI: dict[str, torch.Tensor]) -> _Fisher | None:
    """Return the sums that a killed pass left, or None; an unreadable journal is dropped."""
    if not state.is_file():
        return None
    try:
        with safe_open(state, framework="pt") as stream:
            counts: dict[str, int] = json.loads(stream.metadata()["counts"])
            sums_OI = {name: zeros_OI[name].copy_(stream.get_tensor(name)) for name in zeros_OI}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        log.warning("the journal %s is unreadable (%s); the sensitivity pass starts again", state, error)
        for zero_OI in zeros_OI.values():
            zero_OI.zero_()
        return None
    return _Fisher(sums_OI, counts["num_done"], counts["num_tokens"])


def _save(state: Path, fisher: _Fisher) -> None:
    """Write the sums so that a kill leaves the old journal or the new."""
    temporary = state.with_suffix(".part")
    counts = json.dumps({"num_done": fisher.num_done, "num_tokens": fisher.num_tokens})
    save_file(fisher.sums_OI, temporary, metadata={"counts": counts})
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.replace(state)


def _judge(name: str, weight_OI: torch.Tensor, fisher: _Fisher, cosines: dict[str, float]) -> LayerSensitivity:
    """Weigh the squared rounding error of every format with the Fisher diagonal."""
    predicted = {}
    for format_name in cosines:
        error_OI = FORMATS.get(format_name).round_trip(weight_OI) - weight_OI
        damage = (fisher.sums_OI[name] * error_OI.square()).sum(dtype=torch.float64)
        predicted[format_name] = damage.item() / (2 * fisher.num_tokens)
    return LayerSensitivity(
        layer=name,
        num_weights=weight_OI.numel(),
        predicted_kl_nats=predicted,
        output_cosine=cosines,
        weight_variance=weight_OI.var(correction=0).item(),
    )


@torch.no_grad()
def _output_cosines(
    model: PreTrainedModel, names: tuple[str, ...], formats: tuple[str, ...], sequences: tuple[tuple[int, ...], ...]
) -> dict[str, dict[str, float]]:
    """Return cos(X W^T, X Wq^T) per layer and format over the first COSINE_TOKENS calibration tokens.

    The outputs of all tokens of a layer are compared as one vector; the bias is left out. A layer whose
    outputs are all zero counts as unharmed. Inputs are collected first, so that each weight is rounded once per format.
    """
    inputs_NI: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def collect(arguments: tuple[torch.Tensor, ...], name: str) -> None:
        inputs_NI[name].append(arguments[0].flatten(0, -2))

    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, arguments, name=name: collect(arguments, name))
        for name in names
    ]
    for tokens in _leading(sequences, COSINE_TOKENS):
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    found = {}
    for name in names:
        weight_OI, seen_NI = model.get_parameter(f"{name}.weight"), torch.cat(inputs_NI.pop(name))
        outputs_NO = seen_NI @ weight_OI.T
        rounded = {it: seen_NI @ FORMATS.get(it).round_trip(weight_OI).T for it in formats}
        found[name] = {it: _cosine(outputs_NO, rounded_NO) for it, rounded_NO in rounded.items()}
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
