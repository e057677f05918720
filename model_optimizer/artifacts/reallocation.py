"""What one more change of each layer would do at a chosen mix of formats."""

from model_optimizer.artifacts.base import StageArtifact
from model_optimizer.artifacts.strategy import FormatName


class MixSlopes(StageArtifact):
    slope_nats: dict[str, dict[FormatName, float]]
    """Layer -> format -> <gradient of KL(original || mix), change of the weight from its present format>, per token."""
    kl_nats: float
    """Of the mix, on the calibration tokens that the gradient was taken over."""
    num_tokens: int
