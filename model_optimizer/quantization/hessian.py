"""Factors of the inverse Hessian of a layer's squared output error, made in place so that wide layers fit.

    H = moment + diag(damping),  H^-1 = U^T U with U upper triangular

Shape letters: I input features.
"""

import logging

import numpy as np
import torch

from model_optimizer.errors import UnsupportedError

log = logging.getLogger(__name__)

DAMPING_RATIO = 0.03
"""Share that is added of the mean diagonal and of each input's own, half and half.

Source: measured on five layers of SmolLM2-135M, moments of 4,096 tokens of wikitext2-valid, output error on as many of
wikitext2-test (geometric mean, int4-g64 / int3-g64): 1 % of the mean alone (Frantar et al. 2022, GPTQ, section 4) 0.00134 /
0.00531, 3 % of it 0.00129 / 0.00547, 10 % of the own diagonal alone 0.00132 / 0.00530, 3 % half and half 0.00129 / 0.00513.
Halves damp inputs of very large values enough, and the others not too much. Less damping errs less on the calibration text
itself (0.00064 at 0.1 % against 0.00070) and more elsewhere, so that a search by that error would choose worse.
"""
DAMPING_TRIES = 4
DAMPING_STEP = 10.0
"""A moment that rounding made indefinite is damped ten times more, up to 30 means of the diagonal."""
IN_PLACE_FROM = 4096
"""Inputs from which the CPU saves memory by LAPACK's own threads, which then slow torch's for a while."""
BUILD_ROWS = 1024


def damping(moment_II: torch.Tensor, ratio: float = DAMPING_RATIO) -> torch.Tensor:
    """Return what is added to each diagonal element, float64 [I]; an input that was never seen gets the whole mean besides."""
    diagonal_I = moment_II.diagonal().double()
    mean = diagonal_I.mean().item() or 1.0
    return ratio / 2 * (mean + diagonal_I) + mean * (diagonal_I == 0)


def rounding_order(diagonal_I: torch.Tensor) -> torch.Tensor:
    """Return the inputs by falling diagonal: what matters most is rounded while most can still mend it."""
    return diagonal_I.argsort(descending=True, stable=True)


def inverse_factor(moment_II: torch.Tensor, order_I: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return U of the damped Hessian with inputs in `order_I`, float32 [I, I], and the damping [I] in the moment's own order.

    Damping starts at DAMPING_RATIO and grows until the matrix is definite. Beside moment and result one float64 matrix
    is held.

    Raises:
        UnsupportedError: no damping makes the moment definite, as when it holds values that are not finite.
    """
    if num_dead := int((moment_II.diagonal() == 0).sum().item()):
        log.info("%d of %d inputs are zero in all of calibration; their weights are rounded to nearest", num_dead, len(order_I))
    for attempt in range(DAMPING_TRIES):
        added_I = damping(moment_II, DAMPING_RATIO * DAMPING_STEP**attempt)
        factor_II = _factor(moment_II, added_I, order_I)
        if factor_II is not None:
            return factor_II, added_I
    raise UnsupportedError(
        f"an input moment of {len(order_I)} features is not positive definite at {added_I.max().item():.3g} of damping; "
        "the model gives values that are not finite on the calibration text, or the moments are damaged: use method rtn"
    )


def _factor(moment_II: torch.Tensor, added_I: torch.Tensor, order_I: torch.Tensor) -> torch.Tensor | None:
    """Return U, or None where the matrix is not definite.

    With inputs reversed, H = L L^T; hence H = R R^T with R = L reversed, upper triangular, and U = R^-1 = L^-1 reversed.
    """
    in_place = moment_II.device.type == "cpu" and len(moment_II) >= IN_PLACE_FROM
    return (factor_in_place if in_place else factor)(moment_II, added_I, order_I)


def factor(moment_II: torch.Tensor, added_I: torch.Tensor, order_I: torch.Tensor) -> torch.Tensor | None:
    """Return U by torch's own solvers, on any device; they hold four float64 matrices at once."""
    reversed_I = order_I.flip(0)
    hessian_II = moment_II[reversed_I][:, reversed_I].double()
    hessian_II.diagonal().add_(added_I[reversed_I])
    root_II, failed = torch.linalg.cholesky_ex(hessian_II)
    if failed.item():
        return None
    identity_II = torch.eye(len(order_I), dtype=torch.float64, device=moment_II.device)
    inverse_II = torch.linalg.solve_triangular(root_II, identity_II, upper=False)
    if not torch.isfinite(inverse_II.diagonal()).all():
        return None
    factor_II: torch.Tensor = inverse_II.flip(0, 1).float()
    return factor_II


def factor_in_place(moment_II: torch.Tensor, added_I: torch.Tensor, order_I: torch.Tensor) -> torch.Tensor | None:
    """Return U by LAPACK on the CPU, which holds one float64 matrix."""
    from scipy.linalg import lapack

    reversed_I = order_I.flip(0)
    hessian_II = np.empty(moment_II.shape)
    for start in range(0, len(reversed_I), BUILD_ROWS):
        rows = reversed_I[start : start + BUILD_ROWS]
        hessian_II[start : start + len(rows)] = moment_II[rows][:, reversed_I].numpy()
    hessian_II[np.diag_indices_from(hessian_II)] += added_I[reversed_I].numpy()
    # A symmetric matrix read by columns is itself, which is the order that LAPACK overwrites without a copy.
    root_II, failed = lapack.dpotrf(hessian_II.T, lower=1, clean=1, overwrite_a=1)
    if failed:
        return None
    inverse_II, failed = lapack.dtrtri(root_II, lower=1, overwrite_c=1)
    if failed or not np.isfinite(inverse_II.diagonal()).all():
        return None
    return torch.from_numpy(np.ascontiguousarray(inverse_II[::-1, ::-1], dtype=np.float32))
