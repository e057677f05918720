"""What a profile asks of its model, set against config and shard headers: contradictions that no measuring is needed for.

Torch-free; `feasibility` later sets the same limits against the measured machine.
"""

import re
from pathlib import Path

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.models.dimensions import read_dimensions
from model_optimizer.models.headers import TensorHeader, read_headers
from model_optimizer.models.parts import is_linear, part_of, read_config
from model_optimizer.spec import Sla

KEPT_BITS = 16
"""Fewest bits of what is not quantized (embedding, head, norms)."""
GIB = 2**30


def refuse_impossible(sla: Sla, lowest_bits: float, directory: Path) -> None:
    """Refuse a context that the model does not have, and a memory limit below the weights alone.

    Raises:
        ConfigError: `max_model_len` exceeds the model's positions.
        UnsupportedError: `memory_gib` is less than the weights with every linear layer at `lowest_bits`.
    """
    dimensions = read_dimensions(read_config(directory), directory / "config.json")
    if dimensions.max_position is not None and sla.max_model_len > dimensions.max_position:
        raise ConfigError(
            f"sla.max_model_len {sla.max_model_len} exceeds the {dimensions.max_position} positions of the model in {directory}; "
            f"allowed: at most {dimensions.max_position}"
        )
    weights = smallest_weight_bytes(read_headers(directory), lowest_bits)
    if sla.memory_gib is not None and sla.memory_gib * GIB < weights:
        raise UnsupportedError(
            f"sla.memory_gib {sla.memory_gib:g} is infeasible: the weights alone take {weights / GIB:.4g} GiB with every linear "
            f"layer at {lowest_bits:g} bits, the fewest of scan.bits; allow more memory or fewer bits"
        )


def smallest_weight_bytes(tensors: dict[str, TensorHeader], lowest_bits: float) -> int:
    """Return the weights with linear layers at `lowest_bits`, everything else at 16; a head counts as tied to the embedding."""
    counted = [tensor for tensor in tensors.values() if part_of(tensor.name) != "head"]
    linear = sum(tensor.num_parameters for tensor in counted if is_linear(tensor))
    rest = sum(tensor.num_parameters for tensor in counted) - linear
    return int(linear * min(lowest_bits, KEPT_BITS) + rest * KEPT_BITS) // 8


def refuse_unmatched(patterns: tuple[str, ...], directory: Path) -> None:
    """Refuse layer patterns that fit no module of the model; whole parts of a name count (`q_proj`, `layers.1`).

    Raises:
        ConfigError: names the pattern and what names look like.
    """
    names = [name.removesuffix(".weight") for name in read_headers(directory)]
    for pattern in patterns:
        expression = re.compile(rf"(^|\.){re.escape(pattern)}($|\.)")
        if pattern != "lm_head" and not any(expression.search(name) for name in names):
            raise ConfigError(
                f"quantization: the layer pattern {pattern!r} matches no layer of {directory}; names look like "
                f"{', '.join(names[:2])}"
            )
