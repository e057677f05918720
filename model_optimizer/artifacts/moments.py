"""Result of the calibrated walk over a model's inputs: one second moment per distinct layer input."""

from model_optimizer.artifacts.base import Frozen, StageArtifact


class MomentPlace(Frozen):
    """Where the second moment of one layer's input lies."""

    file: str
    tensor: str
    """Layers that read the same input share it; it is named after the first of them."""
    in_features: int


class Moments(StageArtifact):
    places: dict[str, MomentPlace]
    """By layer."""
    num_tokens: int
    """Tokens that each moment is a mean over."""
    unreached: tuple[str, ...] = ()
    """Layers that saw nothing but zeros, such as experts that no token was sent to."""
