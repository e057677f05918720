"""Results of the quantizer: per-layer sensitivity, and the quantized checkpoint."""

import math

from model_optimizer.artifacts.base import Frozen, StageArtifact
from model_optimizer.artifacts.repair import LayerRaise
from model_optimizer.artifacts.strategy import FormatName, WeightRecipe

MOST_GROWTH_NATS = 2.0
"""Sums up to here were checked against measured mixes (benchmarks/sensitivity_prediction.py); the exponential stops there."""


class LayerSensitivity(Frozen):
    """Predicted damage of storing one linear layer in each format, everything else untouched."""

    layer: str
    num_weights: int
    predicted_kl_nats: dict[FormatName, float]
    """Mean KL per token of the final logits."""
    output_cosine: dict[FormatName, float]
    """Cosine similarity between the layer's outputs before and after, on calibration inputs."""
    weight_variance: float


class CalibrationReport(Frozen):
    """What became of every record of the calibration file; the counts add up to `num_read`."""

    num_requested: int
    num_read: int
    num_empty: int
    num_short: int
    num_duplicate: int
    num_bad: int
    num_held_out: int
    """Kept away from calibration for the scan's KL."""
    num_unused: int
    """Valid records beyond the number asked for."""
    num_used: int
    num_tokens: int
    length_percentiles: dict[str, int]
    """Tokens per used sample: `p50`, `p90`, `p99`, `max`."""
    length_histogram: dict[str, int] = {}
    """Used samples per octave of their tokens: `17-32`, `33-64`, ..."""
    num_cut: int = 0
    """Used samples that were longer than allowed and lost their end."""


class Sensitivity(StageArtifact):
    layers: tuple[LayerSensitivity, ...]
    calibration: CalibrationReport
    num_tokens: int
    seed: int
    growth_per_nat: float = 0.0
    """How layers add up: KL of a plan = S exp(growth S), S the sum over its layers."""

    def total_kl_nats(self, sum_nats: float) -> float:
        """Return the predicted KL of a plan from the sum of its layers' figures; growth ends at MOST_GROWTH_NATS."""
        return sum_nats * math.exp(self.growth_per_nat * min(sum_nats, MOST_GROWTH_NATS))


class LayerPlan(Frozen):
    """The format that one linear layer gets, and why."""

    layer: str
    format: FormatName
    num_weights: int
    num_bytes: int
    """Payload, scales and padding as stored."""
    predicted_kl_nats: float
    output_cosine: float
    suspect: bool
    """Cosine below the floor."""
    reason: str


class Coverage(Frozen):
    """Proof that the checkpoint is what it says."""

    quantized_weights_ratio: float
    """Linear weights really stored below 16 bits, over all linear weights that the plan says."""
    true_bits_per_weight: float
    """Bytes of quantizable layers as stored x 8 over their weights."""
    checkpoint_bytes: int
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


class QuantizedModel(StageArtifact):
    recipe: WeightRecipe
    checkpoint: str | None
    """Directory of the checkpoint inside the entry; None when the source itself is meant (unquantized)."""
    plan: tuple[LayerPlan, ...]
    coverage: Coverage
    predicted_kl_nats: float
    """Of the whole plan: `Sensitivity.total_kl_nats` of the sum over its layers."""
    raised: tuple[LayerRaise, ...] = ()
    """Layers that a repair gave more bits, most harmful first; empty unless an earlier candidate was rejected."""
    calibration: CalibrationReport | None
