"""Sums of X^T X: the lower triangle only, which halves their arithmetic, and the whole once it is needed.

Shape letters: I input features, N tokens.
"""

from itertools import pairwise

import torch

MIRROR_ROWS = 1024
PANEL_ROWS = 384
"""Rows of the sum that are added at once: narrow panels leave out more of the upper triangle, wide ones multiply faster."""


def add_square(sum_II: torch.Tensor, inputs_NI: torch.Tensor) -> None:
    """Add X^T X to the lower triangle of `sum_II`, float32; what lies above it does not count.

    A GPU adds the whole. The CPU adds panel by panel with torch's own products, which share one pool of threads with the
    model around them: with BLAS's `syrk` (scipy), whose threads go on waiting beside torch's, six blocks of SmolLM2-135M took
    5.1 s on two cores and take 1.9 s so (4 x 1024 tokens; 2.1 s in panels of 192 rows, 2.2 s whole).
    """
    if sum_II.device.type != "cpu":
        sum_II.addmm_(inputs_NI.T, inputs_NI)
        return
    size = len(sum_II)
    num_panels = max(1, round(size / PANEL_ROWS))
    edges = [size * number // num_panels for number in range(num_panels + 1)]
    for start, end in pairwise(edges):
        sum_II[start:end, :end].addmm_(inputs_NI[:, start:end].T, inputs_NI[:, :end])


def mirror(lower_II: torch.Tensor) -> torch.Tensor:
    """Copy the lower triangle to the upper one in place, and return the matrix."""
    for start in range(0, len(lower_II), MIRROR_ROWS):
        end = min(start + MIRROR_ROWS, len(lower_II))
        lower_II[start:end, end:] = lower_II[end:, start:end].T
        corner = lower_II[start:end, start:end].tril()
        lower_II[start:end, start:end] = corner + corner.tril(-1).T
    return lower_II
