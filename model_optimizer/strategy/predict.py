"""What a candidate will cost before it runs, and which ones need not run at all.

A decode step streams every weight that the runtime holds and each stream's cache once, or it is limited by
arithmetic, whichever takes longer. What a runtime holds per weight is its own: torch unpacks to float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from model_optimizer.artifacts.front import Prediction
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.target import DeviceFacts, ModelFacts
from model_optimizer.memory.budget import FLOAT32_BYTES, UNPACKING_RUNTIMES, head_bytes, resident_weight_bytes
from model_optimizer.prediction.roofline import decode_tok_per_s, decoder_cost, measured_rates
from model_optimizer.spec import Sla, Traffic
from model_optimizer.traffic.lengths import length_at

UPPER_GUESS = "it is that of plain rounding, and {method} mends what rounding breaks"
SPEED_ERROR_RATIO = 0.25
"""A predicted speed-up below this may be the predictor's error; the scan reports the error that it made."""
MIB = 2**20
MEMORY_ERROR_RATIO = 0.05
"""As `SPEED_ERROR_RATIO`, for resident bytes, which are nearly arithmetic."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine does while its speed is asked: streams, and mean tokens in each one's cache."""

    concurrency: int
    mean_context: float


def load_of(traffic: Traffic, sla: Sla) -> Load:
    """Return the stated load: mean prompt plus half of the mean output, means over 1,000 quantiles."""
    quantiles = (np.arange(1000) + 0.5) / 1000
    prompt = float(length_at(traffic.prompt_tokens, quantiles).mean())
    output = float(length_at(traffic.output_tokens, quantiles).mean())
    return Load(sla.concurrency, min(prompt + output / 2, float(sla.max_model_len)))


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """What quantization makes of the linear layers: their bytes as stored, and the predicted damage."""

    linear_bytes: int
    kl_nats: float


def stored_bytes(strategy: Strategy, facts: ModelFacts, weights: LinearWeights) -> int:
    """Return the weight bytes of the engine's files; what is not a quantized linear layer stays float32."""
    if not strategy.weights.quantized:
        return facts.num_parameters * FLOAT32_BYTES
    return weights.linear_bytes + (facts.num_parameters - facts.num_linear_parameters) * FLOAT32_BYTES


def streamed_bytes(strategy: Strategy, facts: ModelFacts, weights: LinearWeights) -> int:
    """Return the weight bytes that one decode step reads: linear layers as the runtime holds them, and the head.

    Embedding rows are looked up and norms are negligible.
    """
    unpacked = strategy.runtime in UNPACKING_RUNTIMES or not strategy.weights.quantized
    linear = facts.num_linear_parameters * FLOAT32_BYTES if unpacked else weights.linear_bytes
    return linear + head_bytes(facts)


def predict(strategy: Strategy, weights: LinearWeights, device: DeviceFacts, facts: ModelFacts, load: Load) -> Prediction:
    """Return decode tokens per second of all streams by the roofline, resident bytes and KL.

    Integer weights are multiplied at the float32 rate: they save bytes, and the gain in arithmetic is the runtime's own.
    """
    cost = replace(decoder_cost(facts, 32), weight_bytes=streamed_bytes(strategy, facts, weights))
    rate = decode_tok_per_s(cost, measured_rates(device), batch=load.concurrency, context=load.mean_context)
    resident = resident_weight_bytes(strategy.runtime, facts, stored_bytes(strategy, facts, weights))
    guess = UPPER_GUESS.format(method=method) if (method := strategy.weights.method) not in ("none", "rtn") else None
    return Prediction(decode_tok_per_s=rate, resident_bytes=resident, kl_nats=weights.kl_nats, kl_upper_guess=guess)


def prune(predictions: Mapping[str, Prediction], quantized: Sequence[str]) -> dict[str, str]:
    """Return label -> reason for every quantized candidate that another one surely beats.

    Surely: the other is predicted more accurate, and what the candidate gains in speed and in memory lies within the
    predictor's error. Where the candidate's own KL is only an upper guess, none but a lossless one is surely more
    accurate. Unquantized candidates are never pruned; they are what the others are compared with.
    """
    reasons = {}
    for label in quantized:
        mine = predictions[label]
        better = [other for other, theirs in predictions.items() if other != label and _surely_better(theirs, mine)]
        if better:
            best = max(better, key=lambda other: predictions[other].decode_tok_per_s)
            theirs = predictions[best]
            reasons[label] = (
                f"predicted dominated by {best}: {mine.decode_tok_per_s:.1f} against {theirs.decode_tok_per_s:.1f} tok/s "
                f"(error {SPEED_ERROR_RATIO:.0%}), {mine.resident_bytes / MIB:.0f} against {theirs.resident_bytes / MIB:.0f} MiB "
                f"(error {MEMORY_ERROR_RATIO:.0%}), KL {mine.kl_nats:.3g} against {theirs.kl_nats:.3g} nats"
            )
    return reasons


def _surely_better(theirs: Prediction, mine: Prediction) -> bool:
    more_accurate = theirs.kl_nats < mine.kl_nats if mine.kl_upper_guess is None else theirs.kl_nats == 0 < mine.kl_nats
    return (
        more_accurate
        and mine.decode_tok_per_s <= theirs.decode_tok_per_s * (1 + SPEED_ERROR_RATIO)
        and mine.resident_bytes >= theirs.resident_bytes * (1 - MEMORY_ERROR_RATIO)
    )
