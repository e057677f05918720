"""GPTQ: columns are rounded one after another, and what each rounding breaks is mended by the columns that still follow.

    minimise sum over outputs of (w - q) H (w - q)^T,  H = 2 X^T X,  with q on the format's grid
    after column i:  w_j -= (w_i - q_i) / U_ii * U_ij  for j > i,  where H^-1 = U^T U and U is upper triangular
    what remains:    sum over i of (w_i - q_i)^2 / U_ii^2, with w as mended so far

Only ratios of H matter, so the second moment X^T X / N of the layer's input stands for it. Each group's scale is chosen
beforehand, hence columns may be rounded in any order while groups stay contiguous in storage; once the codes are known,
scales are fitted to them and codes moved again in turn. Where a format has zero points they are chosen with the first scales
and kept: codes are counted from them until the end, so that a weight is a code times a scale throughout.

Source: Frantar et al. 2022, GPTQ, algorithm 1 (block updates, damping of 1 % of the mean diagonal); order by falling
diagonal: its authors' implementation. Measured on five layers of SmolLM2-135M in int4-g64, output error of plain
rounding 0.0112 of the output (geometric mean): GPTQ on spanning scales 0.0028, with the order 0.0022, with scales
searched under 1 / U_ii^2 0.00194, fitted again 0.00190. On text that did not calibrate (see hessian.py) two descents take
another 2.4 % off at 4 bits, 2.9 % at 3 and 3.2 % at 2 (5.8, 6.7 and 9.4 % on the calibration text), four of them 3.2, 3.6 and
4.1 %, each for a third of the time that everything before took. 32, 64, 128 or 256 columns between two updates of the rest
cost the same within 10 %.

Shape letters: O output features, I input features, G groups along I, K inputs of one group or of one block.
"""

from functools import partial

import torch

from model_optimizer.formats.base import QuantizedTensor, WeightFormat, join, storable
from model_optimizer.quantization.descent import Objective, descend, spread
from model_optimizer.quantization.hessian import inverse_factor, rounding_order
from model_optimizer.quantization.registry import METHODS
from model_optimizer.quantization.replay import Replay

BLOCK_COLUMNS = 128
SHRINKS = tuple(step / 20 for step in range(20, 6, -1))
"""Shares of the spanning step that a group's scale is searched over, 1 down to 0.35."""
SWEEPS = 2
"""Coordinate descents, each followed by another fit of the scales."""
CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""Weights that are rounded at once: outputs do not depend on each other, so that wide layers go by rows."""
FIT_ELEMENTS = {"cpu": 2**22, "cuda": 2**28}
"""Float64 elements of normal equations that are held at once."""


class Gptq:
    """Deterministic for a given moment."""

    needs_moments = True

    def quantize(
        self, weight_OI: torch.Tensor, weight_format: WeightFormat, moment_II: torch.Tensor | None = None
    ) -> QuantizedTensor:
        assert moment_II is not None, "the caller gives a moment to every method that needs one"
        order_I = rounding_order(moment_II.diagonal())
        factor_II, added_I = inverse_factor(moment_II, order_I)
        rows = max(1, CHUNK_ELEMENTS[weight_OI.device.type] // weight_OI.shape[1])
        chunks = [
            _quantize_rows(
                Objective(weight_OI[at : at + rows].float(), moment_II, added_I.float()), weight_format, order_I, factor_II
            )
            for at in range(0, len(weight_OI), rows)
        ]
        return join(chunks)


def _quantize_rows(
    objective: Objective, weight_format: WeightFormat, order_I: torch.Tensor, factor_II: torch.Tensor
) -> QuantizedTensor:
    spanning = weight_format.quantize(objective.weight_OI)
    importance_I = torch.empty_like(factor_II[0]).index_copy_(0, order_I, factor_II.diagonal() ** -2)
    scale_OG, zero_OG = search_scales(objective.weight_OI, weight_format, importance_I, spanning), spanning.zero_OG
    codes_OI = compensated_codes(objective.weight_OI, weight_format, scale_OG, order_I, factor_II, zero_OG=zero_OG)
    scale_OG = fit_scales(objective, codes_OI, scale_OG)
    for _ in range(SWEEPS):
        codes_OI = descend(objective, codes_OI, scale_OG, weight_format, zero_OG)
        scale_OG = fit_scales(objective, codes_OI, scale_OG)
    if zero_OG is not None:
        codes_OI += spread(zero_OG, codes_OI.shape[1])
    return QuantizedTensor(codes_OI.to(weight_format.code_dtype), scale_OG, zero_OG)


def search_scales(
    weight_OI: torch.Tensor, weight_format: WeightFormat, importance_I: torch.Tensor, spanning: QuantizedTensor
) -> torch.Tensor:
    """Return for each group the share of the spanning step whose plain rounding errs least, weighted by importance.

    Both signs are tried where the format has both. Zero points stay right, since both ends of a range shrink alike.
    """
    spanning_OG, zero_OG = spanning.scale_OG, spanning.zero_OG
    zero_OG1 = None if zero_OG is None else zero_OG.float()[..., None]
    grouped_OGK = weight_OI.reshape(*spanning_OG.shape, -1)
    importance_GK1 = importance_I.reshape(spanning_OG.shape[1], -1, 1)
    best_OG, least_OG = spanning_OG.clone(), torch.full_like(spanning_OG, torch.inf, dtype=torch.float32)
    for share in (sign * shrink for shrink in SHRINKS for sign in ((1, -1) if weight_format.signed_scale else (1,))):
        scale_OG = storable(spanning_OG.float() * share, spanning_OG.dtype)
        step_OG1 = scale_OG.float()[..., None]
        error_OGK = weight_format.nearest_codes(grouped_OGK, step_OG1, zero_OG1).mul_(step_OG1).sub_(grouped_OGK)
        loss_OG = (error_OGK.square_()[..., None, :] @ importance_GK1)[..., 0, 0]
        better_OG = loss_OG < least_OG
        best_OG, least_OG = torch.where(better_OG, scale_OG, best_OG), torch.where(better_OG, loss_OG, least_OG)
    return best_OG


def compensated_codes(
    weight_OI: torch.Tensor,
    weight_format: WeightFormat,
    scale_OG: torch.Tensor,
    order_I: torch.Tensor,
    factor_II: torch.Tensor,
    *,
    zero_OG: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the codes less zero points [O, I], as floats, rounding one input after another.

    Later blocks are mended once per block.
    """
    weight_IO, scale_IO = weight_OI.T[order_I], spread(scale_OG, weight_OI.shape[1]).T[order_I]
    zero_IO = None if zero_OG is None else spread(zero_OG, weight_OI.shape[1]).T[order_I]
    codes_IO = torch.empty_like(weight_IO)
    round_block = Replay(partial(_round_block, weight_format))
    for start in range(0, len(weight_IO), BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, len(weight_IO))
        zero_KO = None if zero_IO is None else zero_IO[start:end]
        codes_KO, errors_KO = round_block(weight_IO[start:end], scale_IO[start:end], factor_II[start:end, start:end], zero_KO)
        codes_IO[start:end] = codes_KO
        weight_IO[end:].addmm_(factor_II[start:end, end:].T, errors_KO, alpha=-1)
    return torch.empty_like(weight_OI).index_copy_(1, order_I, codes_IO.T)


def _round_block(
    weight_format: WeightFormat,
    weight_KO: torch.Tensor,
    scale_KO: torch.Tensor,
    factor_KK: torch.Tensor,
    zero_KO: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes less zero points and errors over the factor's diagonal; the weights are mended in place."""
    codes_KO, errors_KO = torch.empty_like(weight_KO), torch.empty_like(weight_KO)
    for row in range(len(weight_KO)):
        value_O, scale_O = weight_KO[row], scale_KO[row]
        codes_KO[row] = weight_format.nearest_codes(value_O, scale_O, None if zero_KO is None else zero_KO[row])
        error_O = (value_O - codes_KO[row] * scale_O) / factor_KK[row, row]
        weight_KO[row + 1 :].addr_(factor_KK[row, row + 1 :], error_O, alpha=-1)
        errors_KO[row] = error_O
    return codes_KO, errors_KO


def fit_scales(objective: Objective, codes_OI: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
    """Return the scales of least output error at given codes, zero points taken off.

    Row by row the normal equations sum over g' of (c_g H c_g') s_g' = c_g H w are solved, c_g a group's codes. A group
    without a code other than zero keeps its scale, and so does a row in which the best scale of a group is none or turned.
    """
    num_groups = scale_OG.shape[1]
    rows = max(1, FIT_ELEMENTS[codes_OI.device.type] // num_groups**2)
    target_OI = objective.gradient(objective.weight_OI)
    fitted = [
        _solve_scales(objective, target_OI[at : at + rows], codes_OI[at : at + rows], num_groups)
        for at in range(0, len(codes_OI), rows)
    ]
    empty_OG = codes_OI.reshape(*scale_OG.shape, -1).eq(0).all(-1)
    fitted_OG = torch.where(empty_OG, scale_OG, torch.cat(fitted).to(scale_OG.dtype))
    usable_OG = torch.isfinite(fitted_OG) & (fitted_OG * scale_OG.sign() >= torch.finfo(scale_OG.dtype).smallest_normal)
    return torch.where(usable_OG.all(1, keepdim=True), fitted_OG, scale_OG)


def _solve_scales(objective: Objective, target_OI: torch.Tensor, codes_OI: torch.Tensor, num_groups: int) -> torch.Tensor:
    codes_OGK = codes_OI.reshape(len(codes_OI), num_groups, -1)
    normal_OGG = codes_OI.new_empty(len(codes_OI), num_groups, num_groups, dtype=torch.float64)
    for group, block_KI in enumerate(objective.moment_II.reshape(num_groups, -1, objective.moment_II.shape[1])):
        normal_OGG[:, group] = ((codes_OGK[:, group] @ block_KI).reshape_as(codes_OGK) * codes_OGK).sum(-1)
    damping_OG = (codes_OGK.square() * objective.added_I.reshape(1, num_groups, -1)).sum(-1).double()
    target_OG = (target_OI.reshape_as(codes_OGK) * codes_OGK).sum(-1).double()
    normal_OGG += torch.diag_embed(damping_OG)
    normal_OGG += torch.diag_embed((normal_OGG.diagonal(dim1=1, dim2=2) == 0).double())
    solved_OG1: torch.Tensor
    solved_OG1, _ = torch.linalg.solve_ex(normal_OGG, target_OG[..., None])
    return solved_OG1[..., 0]


METHODS.register("gptq")(Gptq())
