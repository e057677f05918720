"""Coordinate descent on codes: each weight moves to the code that errs least while all others stay.

    minimise sum over outputs of (q - w) H (q - w)^T;  for input i alone the best q_i is q_i - (E H)_i / H_ii,
    E = q - w, rounded to the grid, because the loss is a parabola in q_i

No move raises the loss. Inputs go in storage order; what a block of moves changes for later blocks is added once per block.
Source: the update of OBQ/QuantEase (Behdin et al. 2023, section 3) for a fixed grid.

Shape letters: O output features, I input features, G groups along I, K inputs of one block.
"""

from dataclasses import dataclass
from functools import partial

import torch

from model_optimizer.formats.base import WeightFormat
from model_optimizer.quantization.replay import Replay

BLOCK_INPUTS = 128


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised: the weights to come near, and the Hessian as a moment and its damping."""

    weight_OI: torch.Tensor
    moment_II: torch.Tensor
    added_I: torch.Tensor
    """float32 damping of each input."""

    def gradient(self, error_OI: torch.Tensor) -> torch.Tensor:
        """Return E H [O, I], half the gradient."""
        return (error_OI @ self.moment_II).addcmul_(error_OI, self.added_I)

    def loss(self, error_OI: torch.Tensor) -> torch.Tensor:
        """Return E H E^T of each output [O]."""
        return (self.gradient(error_OI) * error_OI).sum(1)


def spread(values_OG: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """Return a value per group as float32 [O, I], repeated over each group."""
    return values_OG.float().repeat_interleave(num_inputs // values_OG.shape[1], dim=1)


def descend(
    objective: Objective,
    codes_OI: torch.Tensor,
    scale_OG: torch.Tensor,
    weight_format: WeightFormat,
    zero_OG: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the codes, as floats counted from the zero points, after one sweep over all inputs."""
    num_inputs = codes_OI.shape[1]
    scale_OI = spread(scale_OG, num_inputs)
    zero_IO = None if zero_OG is None else spread(zero_OG, num_inputs).T.contiguous()
    gradient_IO = objective.gradient(codes_OI * scale_OI - objective.weight_OI).T.contiguous()
    codes_IO, scale_IO = codes_OI.T.contiguous(), scale_OI.T.contiguous()
    curvature_I = objective.moment_II.diagonal() + objective.added_I
    descend_block = Replay(partial(_descend_block, weight_format))
    for start in range(0, num_inputs, BLOCK_INPUTS):
        end = min(start + BLOCK_INPUTS, num_inputs)
        zero_KO = None if zero_IO is None else zero_IO[start:end]
        moment_KK, curvature_K = objective.moment_II[start:end, start:end], curvature_I[start:end]
        codes_KO, moved_KO = descend_block(
            codes_IO[start:end], scale_IO[start:end], gradient_IO[start:end], moment_KK, curvature_K, zero_KO
        )
        codes_IO[start:end] = codes_KO
        gradient_IO[end:].addmm_(objective.moment_II[start:end, end:].T, moved_KO)
    return codes_IO.T.contiguous()


def _descend_block(
    weight_format: WeightFormat,
    codes_KO: torch.Tensor,
    scale_KO: torch.Tensor,
    gradient_KO: torch.Tensor,
    moment_KK: torch.Tensor,
    curvature_K: torch.Tensor,
    zero_KO: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the moved codes and how far their weights moved; codes and gradient are overwritten."""
    moved_KO = torch.empty_like(codes_KO)
    for row in range(len(codes_KO)):
        value_O = codes_KO[row] * scale_KO[row]
        best_O = value_O - gradient_KO[row] / curvature_K[row]
        code_O = weight_format.nearest_codes(best_O, scale_KO[row], None if zero_KO is None else zero_KO[row])
        torch.sub(code_O * scale_KO[row], value_O, out=moved_KO[row])
        codes_KO[row] = code_O
        gradient_KO[row + 1 :].addr_(moment_KK[row, row + 1 :], moved_KO[row])
    return codes_KO, moved_KO
