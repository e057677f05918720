"""Result of replaying calibration text for the inputs of linear layers: how far each layer's input reaches."""

from model_optimizer.artifacts.base import Frozen, StageArtifact


class InputRange(Frozen):
    """Magnitudes of one layer's input over all calibration tokens."""

    largest: float
    kept: float
    """What the frozen step must reach: the percentile that was asked for, at most `largest`."""


class ActivationRanges(StageArtifact):
    ranges: dict[str, InputRange]
    """By layer; layers that read one input share it."""
    percentile: float
    num_tokens: int
