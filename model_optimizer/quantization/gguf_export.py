"""Store a model as one GGUF file, with rounding errors weighed by what its layers see where calibration text is given."""

from pathlib import Path

import numpy as np

from model_optimizer.artifacts.base import StageInputs, Stored, Tree
from model_optimizer.artifacts.exported import GgufModel
from model_optimizer.artifacts.moments import Moments
from model_optimizer.decisions import Decision
from model_optimizer.formats.gguf.base import Floats
from model_optimizer.formats.gguf.writer import GgufJob, write_gguf
from model_optimizer.models.sources import CheckpointSource
from model_optimizer.protocols import Progress
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.moments import KIND as MOMENTS
from model_optimizer.quantization.moments import MomentsInputs, measure_moments, read_moment
from model_optimizer.store import Store, file_refs, stage_key

KIND = "gguf"


class GgufInputs(StageInputs):
    """Everything that the export reads."""

    model: Tree
    recipe: str
    """A name of `formats/gguf/recipes.py`."""
    name: str
    """The model's name, as the file states it."""
    calibration: CalibrationSource | None = None
    config: QuantizationConfig = QuantizationConfig()


def export_gguf(inputs: GgufInputs, workspace: Path, *, store: Store, progress: Progress) -> GgufModel:
    """Write `<name>-<recipe>.gguf` to the workspace; a killed export goes on after its last tensor.

    Raises:
        ConfigError: an unknown recipe, or no usable calibration sample.
        UnsupportedError: the extra `gguf` is missing, or the architecture or its tokenizer is not covered.
    """
    moments = None if inputs.calibration is None else _moments(inputs, inputs.calibration, store, progress)
    job = GgufJob(
        model=inputs.model.path,
        source=CheckpointSource(inputs.model.path),
        source_digest=inputs.model.digest,
        recipe=inputs.recipe,
        name=inputs.name,
        importance={} if moments is None else _importance(moments),
    )
    file = f"{inputs.name}-{inputs.recipe}.gguf"
    written = write_gguf(job, workspace / file, progress=progress)
    num_tokens = 0 if moments is None else moments.artifact.num_tokens
    decision = Decision(
        subject="importance of inputs",
        choice="all alike" if moments is None else "the second moment of every layer's input",
        because="no calibration data were given" if moments is None else "inputs that are larger in use cost more when rounded",
        numbers={"num_tokens": num_tokens},
    )
    return GgufModel(
        file=file,
        recipe=inputs.recipe,
        num_bytes=written.num_bytes,
        bits_per_weight=written.bits_per_weight,
        tensor_types=written.types,
        importance_tokens=num_tokens,
        files=file_refs(workspace, workspace / file),
        decisions=(decision,),
        warnings=written.warnings,
    )


def _moments(inputs: GgufInputs, calibration: CalibrationSource, store: Store, progress: Progress) -> Stored[Moments]:
    """Return the moments that quantization into checkpoints shares."""
    wanted = MomentsInputs(
        fingerprint=inputs.fingerprint,
        model=inputs.model,
        calibration=calibration,
        num_sequences=inputs.config.moments_sequences,
        max_tokens=inputs.config.moments_tokens,
    )
    return store.produce(
        MOMENTS, stage_key(wanted), Moments, lambda workspace: measure_moments(wanted, workspace, progress=progress)
    )


def _importance(moments: Stored[Moments]) -> dict[str, Floats]:
    """Return the mean square of every input by layer; a layer that saw nothing weighs all alike."""
    found: dict[str, Floats] = {}
    by_tensor: dict[str, Floats] = {}
    for layer, place in moments.artifact.places.items():
        if place.tensor not in by_tensor:
            diagonal = read_moment(moments.directory, moments.artifact, layer).diagonal()
            by_tensor[place.tensor] = diagonal.numpy().astype(np.float32)
        if by_tensor[place.tensor].any():
            found[layer] = by_tensor[place.tensor]
    return found
