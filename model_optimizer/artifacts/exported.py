"""Results that no later stage reads: a checkpoint that was rounded without data, and a model as one GGUF file."""

from model_optimizer.artifacts.base import StageArtifact
from model_optimizer.artifacts.quantized import Coverage
from model_optimizer.artifacts.strategy import FormatName


class RoundedModel(StageArtifact):
    """A checkpoint whose linear layers were rounded to nearest, all in one format."""

    checkpoint: str
    """Directory of the checkpoint inside the entry."""
    format: FormatName
    coverage: Coverage


class GgufModel(StageArtifact):
    """A model in one GGUF file."""

    file: str
    recipe: str
    """The mixture of block types, e.g. `q4_k_m`."""
    num_bytes: int
    bits_per_weight: float
    """Bytes of all tensors as stored x 8 over their weights."""
    tensor_types: dict[str, int]
    """How many tensors have each block type."""
    importance_tokens: int
    """Calibration tokens that the errors were weighed by; 0 = all inputs alike."""
