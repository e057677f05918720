"""Coordinate descent on codes: each weight moves to the code that errs least while all others stay.

    minimise sum over outputs of (q - w) H (q - w)^T;  for input i alone the best q_i is q_i - (E H)_i / H_ii,
    E = q - w, rounded to the grid, because the loss is a parabola in q_i

No move raises the loss. Inputs go in storage order; what a block of moves changes for later blocks is added once per block.
Source: the update of OBQ/QuantEase (Behdin et al. 2023, section 3) for a fixed grid.

Shape letters: O output features, I input features, G groups along I, K inputs of one block.
"""

from dataclasses import dataclass

import torch

from model_optimizer.formats.base import WeightFormat

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
    for start in range(0, num_inputs, BLOCK_INPUTS):
        end = min(start + BLOCK_INPUTS, num_inputs)
        moved_KO = torch.empty_like(codes_IO[start:end])
        for row in range(start, end):
            value_O = codes_IO[row] * scale_IO[row]
            best_O = value_O - gradient_IO[row] / curvature_I[row]
            code_O = weight_format.nearest_codes(best_O, scale_IO[row], None if zero_IO is None else zero_IO[row])
            torch.sub(code_O * scale_IO[row], value_O, out=moved_KO[row - start])
            codes_IO[row] = code_O
            gradient_IO[row + 1 : end].addr_(objective.moment_II[row, row + 1 : end], moved_KO[row - start])
        gradient_IO[end:].addmm_(objective.moment_II[start:end, end:].T, moved_KO)
    return codes_IO.T.contiguous()
