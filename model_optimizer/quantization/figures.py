"""Measures that every quantized checkpoint has, whoever rounded it."""

from pathlib import Path

from model_optimizer.artifacts.measure import Dimension, Measure
from model_optimizer.artifacts.quantized import Coverage
from model_optimizer.models.headers import read_headers
from model_optimizer.quantization.coverage import true_bits_per_weight
from model_optimizer.quantization.layers import ModelLayers


def size_measures(source: Path, layers: ModelLayers, coverage: Coverage) -> tuple[Measure, ...]:
    """Return size, true bits and coverage of a checkpoint against its source."""
    headers = read_headers(source)
    return (
        Measure(
            name="weight_bytes",
            dimension=Dimension.RESOURCE,
            unit="bytes",
            value=coverage.checkpoint_bytes,
            baseline=sum(header.num_bytes for header in headers.values()),
            reason="all tensors as stored, packed layers with scales",
        ),
        Measure(
            name="true_bits_per_weight",
            dimension=Dimension.RESOURCE,
            unit="bits",
            value=coverage.true_bits_per_weight,
            baseline=true_bits_per_weight(layers.linears, headers),
            reason="payload and scales of the quantizable layers; embedding, head and norms are not in it",
        ),
        Measure(
            name="coverage_ratio",
            dimension=Dimension.RESOURCE,
            unit="ratio",
            value=coverage.quantized_weights_ratio,
            higher_is_better=True,
            reason="share of the planned weights that the written headers show below 16 bits",
        ),
    )
