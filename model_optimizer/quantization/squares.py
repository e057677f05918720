"""Sums of X^T X: the lower triangle only, which halves their arithmetic, and the whole once it is needed.

Shape letters: I input features, N tokens.
"""

import torch

MIRROR_ROWS = 1024


def add_square(sum_II: torch.Tensor, inputs_NI: torch.Tensor) -> None:
    """Add X^T X to the lower triangle of `sum_II`, float32 and contiguous; what lies above it does not count.

    Measured on one AVX2 core against `addmm_`, CPU time: 1024 x 1536 22.5 ms for 38.5, 256 x 576 0.78 for 1.48.
    """
    if sum_II.device.type != "cpu":
        sum_II.addmm_(inputs_NI.T, inputs_NI)
        return
    from scipy.linalg import blas

    # BLAS reads by columns: the lower triangle of a matrix by rows is the upper one of its transpose.
    held = sum_II.numpy().T
    added = blas.ssyrk(1.0, inputs_NI.contiguous().numpy().T, beta=1.0, c=held, lower=0, overwrite_c=1)
    assert added.ctypes.data == sum_II.data_ptr(), "BLAS copied the sum, which must be contiguous float32"


def mirror(lower_II: torch.Tensor) -> torch.Tensor:
    """Copy the lower triangle to the upper one in place, and return the matrix."""
    for start in range(0, len(lower_II), MIRROR_ROWS):
        end = min(start + MIRROR_ROWS, len(lower_II))
        lower_II[start:end, end:] = lower_II[end:, start:end].T
        corner = lower_II[start:end, start:end].tril()
        lower_II[start:end, start:end] = corner + corner.tril(-1).T
    return lower_II
