"""Proof from the written headers that a checkpoint holds what its plan says."""

from pathlib import Path

from model_optimizer.artifacts.quantized import Coverage
from model_optimizer.errors import IntegrityError
from model_optimizer.formats.compressed_tensors import read_checkpoint_headers
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.formats.storage import SHAPE, SUFFIXES, WEIGHT, stored_parts
from model_optimizer.models.headers import TensorHeader, read_headers
from model_optimizer.quantization.layers import LinearLayer


def measure_coverage(
    source: Path, checkpoint: Path, layers: tuple[LinearLayer, ...], plan: dict[str, str], tied: bool
) -> Coverage:
    """Return how much of the plan the checkpoint's headers confirm; no weight is read."""
    headers = read_checkpoint_headers(checkpoint)
    expected = set(read_headers(source)) - ({"lm_head.weight"} if tied else set())
    planned = [layer for layer in layers if FORMATS.get(plan[layer.name]).on_grid]
    for layer in planned:
        expected.discard(f"{layer.name}.weight")
        parts = stored_parts(FORMATS.get(plan[layer.name]), layer.out_features, layer.in_features)
        expected |= {layer.name + part.suffix for part in parts}
    num_planned = sum(layer.num_weights for layer in planned)
    num_stored = sum(layer.num_weights for layer in planned if _is_stored(layer, plan[layer.name], headers))
    return Coverage(
        quantized_weights_ratio=num_stored / num_planned if num_planned else 0.0,
        true_bits_per_weight=true_bits_per_weight(layers, headers),
        checkpoint_bytes=sum(header.num_bytes for header in headers.values()),
        missing_keys=tuple(sorted(expected - headers.keys())),
        unexpected_keys=tuple(sorted(headers.keys() - expected)),
    )


def require_coverage(coverage: Coverage, plan: dict[str, str]) -> None:
    """Refuse a checkpoint that is not wholly what was planned.

    Raises:
        IntegrityError: says which share is stored and names missing and unexpected tensors.
    """
    planned = any(name != FULL_PRECISION for name in plan.values())
    if coverage.missing_keys or coverage.unexpected_keys or (planned and coverage.quantized_weights_ratio < 1):
        raise IntegrityError(
            f"the written checkpoint is not what was planned: {coverage.quantized_weights_ratio:.4f} of the planned weights are "
            f"stored below 16 bits (1 is required), missing: {', '.join(coverage.missing_keys[:5]) or 'none'}, "
            f"unexpected: {', '.join(coverage.unexpected_keys[:5]) or 'none'}; delete the store entry and run again"
        )


def true_bits_per_weight(layers: tuple[LinearLayer, ...], headers: dict[str, TensorHeader]) -> float:
    """Return bits as stored, scales and zero points included but no shape records, over the weights of all quantizable layers."""
    suffixes = (WEIGHT, *(suffix for suffix in SUFFIXES if suffix != SHAPE))
    names = [layer.name + suffix for layer in layers for suffix in suffixes]
    stored = sum(headers[name].num_bytes for name in names if name in headers)
    return 8 * stored / sum(layer.num_weights for layer in layers)


def _is_stored(layer: LinearLayer, format_name: str, headers: dict[str, TensorHeader]) -> bool:
    """Return whether all parts of this layer in this format have the types and shapes that they must have."""
    for part in stored_parts(FORMATS.get(format_name), layer.out_features, layer.in_features):
        header = headers.get(layer.name + part.suffix)
        if header is None or (header.dtype, header.shape) != (part.dtype, part.shape):
            return False
    return True
