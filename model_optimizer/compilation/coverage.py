"""How much of what the checkpoint stores as codes the built engine really computes from codes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from model_optimizer.formats.compressed_tensors import read_plan
from model_optimizer.models.headers import read_headers

SHOWN = 3
"""Layers that a message names."""


@dataclass(frozen=True, slots=True)
class IntegerCoverage:
    """Quantized weights, and those of them that a trial run computed from their codes."""

    share: float
    lost: tuple[str, ...]
    """Layers that fell back to float."""
    num_layers: int

    @property
    def fault(self) -> str | None:
        """Say what fell back, or None."""
        if not self.lost:
            return None
        named = ", ".join(self.lost[:SHOWN]) + (", ..." if len(self.lost) > SHOWN else "")
        return (
            f"only {self.share:.1%} of the quantized weights are computed from their codes (100% is needed): "
            f"{len(self.lost)} of {self.num_layers} layers fell back to float ({named})"
        )


def integer_coverage(sizes: Mapping[str, int], integer: Collection[str]) -> IntegerCoverage:
    """Hold the layers that were seen to compute from codes against all that are stored so (layer -> number of weights)."""
    seen = sum(size for layer, size in sizes.items() if layer in integer)
    return IntegerCoverage(seen / sum(sizes.values()), tuple(sorted(sizes.keys() - set(integer))), len(sizes))


def quantized_sizes(checkpoint: Path, source: Path) -> dict[str, int]:
    """Return layer -> number of weights of every layer that the checkpoint stores as codes, as the source model shapes it."""
    headers = read_headers(source)
    return {layer: headers[f"{layer}.weight"].num_parameters for layer in read_plan(checkpoint)}
