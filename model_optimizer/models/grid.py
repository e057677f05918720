"""Find out whether weights already lie on a quantization grid, as those of a dequantized GGUF do.

Such weights flatter whatever quantizer happens to use the same grid, so the profile says it.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_optimizer.models.headers import TensorHeader, read_headers
from model_optimizer.models.parts import is_linear
from model_optimizer.models.weights import read_rows

NUM_LAYERS_SAMPLED = 8
NUM_ROWS_SAMPLED = 32
GROUP_SIZES = (128, 64, 32, 16)
MAX_STEPS = 255
"""Most steps between the smallest and largest value of a group: 8 bits."""
MAX_TOLERANCE_STEPS = 0.1
"""Values further than this from the grid refute it. 16 random values pass one grid with probability (2 x 0.1)^14 = 2e-10."""
_EPSILON = {"torch.float32": 2.0**-24, "torch.float16": 2.0**-11, "torch.bfloat16": 2.0**-8}
"""Largest relative error of rounding to a type. A value's place between the lowest and the highest, both rounded too, is off by
at most twice that, times steps, times how far the values lie from zero in units of their range."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A uniform grid per group of consecutive inputs (`group_size` None: per output channel)."""

    bits: int
    group_size: int | None
    symmetric: bool

    def __str__(self) -> str:
        place = "per channel" if self.group_size is None else f"group {self.group_size}"
        return f"{self.bits}-bit {place} {'symmetric' if self.symmetric else 'asymmetric'}"


def detect_grid(directory: Path) -> str | None:
    """Return e.g. `4-bit group 32 asymmetric` where most sampled linears lie on one kind of grid, else None."""
    layers = [tensor for tensor in read_headers(directory).values() if is_linear(tensor)]
    if not layers:
        return None
    count = min(NUM_LAYERS_SAMPLED, len(layers))
    sampled = [layers[index * len(layers) // count] for index in range(count)]
    grids = [grid for layer in sampled if (grid := _layer_grid(layer))]
    if 2 * len(grids) <= len(sampled):
        return None
    (group_size, _), _ = Counter((grid.group_size, grid.symmetric) for grid in grids).most_common(1)[0]
    alike = [grid for grid in grids if grid.group_size == group_size]
    if 2 * len(alike) <= len(sampled):
        return None
    return str(Grid(max(grid.bits for grid in alike), group_size, all(grid.symmetric for grid in alike)))


def _layer_grid(layer: TensorHeader) -> Grid | None:
    """Look at the first rows of one layer."""
    rows = read_rows(layer, NUM_ROWS_SAMPLED)
    return find_grid(rows.double().numpy(), _EPSILON.get(str(rows.dtype), 0.0))


def find_grid(weight_OI: NDArray[np.float64], epsilon: float) -> Grid | None:
    """Return the grid with the largest group on which a matrix [out, in] lies; `epsilon` is its type's rounding error."""
    width = weight_OI.shape[1]
    for size in (None, *GROUP_SIZES):
        length = size or width
        if length <= width and width % length == 0 and (grid := _grid_of_groups(weight_OI.reshape(-1, length), size, epsilon)):
            return grid
    return None


def _grid_of_groups(groups_NG: NDArray[np.float64], size: int | None, epsilon: float) -> Grid | None:
    """Fit the coarsest grid to every group; None where a group fits none of up to 256 levels."""
    low_N, high_N = groups_NG.min(axis=1), groups_NG.max(axis=1)
    varied = high_N > low_N
    groups_NG, low_N, high_N = groups_NG[varied], low_N[varied], high_N[varied]
    if not len(groups_NG):
        return None
    steps_N = _coarsest_steps(groups_NG, low_N, high_N, epsilon)
    if not steps_N.all():
        return None
    step_N = (high_N - low_N) / steps_N
    offset_N = low_N / step_N
    magnitude_N = np.maximum(np.abs(low_N), np.abs(high_N)) / step_N
    bits = max(2, int(np.ceil(np.log2(steps_N.max() + 1))))
    holds_zero = np.abs(offset_N - np.rint(offset_N)) <= MAX_TOLERANCE_STEPS
    symmetric_bits = max(2, 1 + int(np.ceil(np.log2(np.rint(magnitude_N.max())))))
    if holds_zero.all() and symmetric_bits <= max(bits, 2):
        return Grid(symmetric_bits, size, symmetric=True)
    return Grid(bits, size, symmetric=False)


def _coarsest_steps(
    groups_NG: NDArray[np.float64], low_N: NDArray[np.float64], high_N: NDArray[np.float64], epsilon: float
) -> NDArray[np.int64]:
    """Return the smallest number of equal steps from lowest to highest value that meets all values; 0 where none does."""
    steps_N = np.zeros(len(groups_NG), dtype=np.int64)
    waiting = np.arange(len(groups_NG))
    relative_NG = (groups_NG - low_N[:, None]) / (high_N - low_N)[:, None]
    spread_N = np.maximum(np.abs(low_N), np.abs(high_N)) / (high_N - low_N)
    for steps in range(1, MAX_STEPS + 1):
        place_WG = relative_NG[waiting] * steps
        tolerance_W = 1e-3 + 2 * steps * epsilon * spread_N[waiting]
        fits_W = (np.abs(place_WG - np.rint(place_WG)).max(axis=1) <= tolerance_W) & (tolerance_W <= MAX_TOLERANCE_STEPS)
        steps_N[waiting[fits_W]] = steps
        waiting = waiting[~fits_W]
        if not len(waiting):
            break
    return steps_N
