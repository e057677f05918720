"""Result of importing a model: a Hugging Face directory made from another format."""

from model_optimizer.artifacts.base import StageArtifact


class ImportedModel(StageArtifact):
    directory: str
    """The Hugging Face directory, relative to the entry."""
    digest: str
    """`tree_digest` of that directory."""
    source: str
    """One line for people: which file it was and how its weights were stored."""
    source_bytes: int
    """Size of the original weight file."""
    tensor_types: dict[str, int]
    """How many tensors the original stored in each of its types, e.g. `Q4_1: 210`."""
