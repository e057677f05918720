"""Result of a foldable transform: the same function, with weights that round better."""

from model_optimizer.artifacts.base import StageArtifact


class Transformed(StageArtifact):
    transform: str
    checkpoint: str
    """Directory of the full-precision checkpoint inside the entry."""
    num_edited_tensors: int
    added_bytes: int = 0
    """What the checkpoint grew by, e.g. a head that had to leave its tie to the embedding."""
    logits_error_ratio: float
    """Root mean square difference of logits on a few tokens, over the original's own."""
