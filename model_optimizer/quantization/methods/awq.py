"""Rounding of AWQ: each group's step is searched by the error of its weights, weighed by how large its inputs are.

The scales that give AWQ its name are folded into the model before (transforms/awq.py); this is the clipping that follows.

    minimise sum over inputs of H_ii (w_i - round(w_i))^2 over shares of the spanning step, for each group by itself

Source: Lin et al. 2023, AWQ, whose implementation searches clipping by the output error of a group.

Shape letters: O output features, I input features, G groups along I.
"""

import torch

from model_optimizer.formats.base import QuantizedTensor, WeightFormat
from model_optimizer.quantization.methods.gptq import search_scales
from model_optimizer.quantization.registry import METHODS


class Awq:
    """Deterministic for a given moment."""

    needs_moments = True

    def quantize(
        self, weight_OI: torch.Tensor, weight_format: WeightFormat, moment_II: torch.Tensor | None = None
    ) -> QuantizedTensor:
        assert moment_II is not None, "the caller gives a moment to every method that needs one"
        spanning = weight_format.quantize(weight_OI)
        scale_OG = search_scales(weight_OI.float(), weight_format, moment_II.diagonal(), spanning)
        return weight_format.quantize(weight_OI, scale_OG, spanning.zero_OG)


METHODS.register("awq")(Awq())
