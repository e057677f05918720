"""One layer whose rounding is learned: every weight may be moved by up to half a step before it is rounded, every step by a half.

    step = ratio x first step,  code = nearest(weight / step + offset),  rounded weight = code x step

Offsets and ratios follow the sign of the loss's gradient g, which passes a rounding as if it were not there and stops where
the grid ends:

    d loss / d offset ~ g sign(step)            (only its sign matters)
    d loss / d ratio  ~ sum over a group of g sign(step) (code - weight / step)

Where a format's scales may be negative, the first step puts each group's largest magnitude on the outermost code, else it is
the spanning one. Measured on SmolLM2-135M on an H200, 200 steps, KL over 53,248 tokens of wikitext2-test, spanning and signed
first steps: int3-g32 0.246 and 0.197, int4-g64 0.0760 and 0.0692.

Source: Cheng et al. 2023, SignRound (AutoRound), sections 3.2 and 3.3, whose gradients are worked out here by hand.

Shape letters: O output features, I input features, G groups along I, K inputs of one group.
"""

import torch

from model_optimizer.formats.base import QuantizedTensor, WeightFormat, storable

MOST_OFFSET = 0.5
LEAST_RATIO, MOST_RATIO = 0.5, 1.5


class LearnedRounding:
    """Starts at plain rounding."""

    def __init__(self, weight_OI: torch.Tensor, weight_format: WeightFormat):
        spanning = weight_format.quantize(weight_OI)
        grouped_OGK = weight_OI.float().reshape(*spanning.scale_OG.shape, -1)
        self._format = weight_format
        first_OG = outermost_step(grouped_OGK, weight_format) if weight_format.signed_scale else spanning.scale_OG.float()
        self._first_OG1 = first_OG[..., None]
        self._zero_OG = spanning.zero_OG
        self._zero_OG1 = None if spanning.zero_OG is None else spanning.zero_OG.float()[..., None]
        self._weight_OGK = grouped_OGK / self._first_OG1
        self._offset_OGK = torch.zeros_like(self._weight_OGK)
        self._ratio_OG1 = torch.ones_like(self._first_OG1)

    def weight(self) -> torch.Tensor:
        """Return the rounded weight [O, I], a leaf that a loss may be differentiated by."""
        weight_OI = (self._codes() * (self._first_OG1 * self._ratio_OG1)).flatten(1)
        return weight_OI.requires_grad_(True)

    def learn(self, gradient_OI: torch.Tensor, rate: float) -> None:
        """Move offsets and ratios by `rate` against the sign of the loss's gradient by `weight()`."""
        gradient_OGK = gradient_OI.reshape_as(self._weight_OGK) * self._first_OG1.sign()
        codes_OGK, exact_OGK = self._codes(), self._weight_OGK / self._ratio_OG1
        inside_OGK = (codes_OGK - exact_OGK - self._offset_OGK).abs_() <= MOST_OFFSET
        of_ratio_OG1 = (gradient_OGK * (codes_OGK - exact_OGK * inside_OGK)).sum(-1, keepdim=True)
        self._offset_OGK.sub_(gradient_OGK.sign() * inside_OGK, alpha=rate).clamp_(-MOST_OFFSET, MOST_OFFSET)
        self._ratio_OG1.sub_(of_ratio_OG1.sign(), alpha=rate).clamp_(LEAST_RATIO, MOST_RATIO)

    def finished(self) -> QuantizedTensor:
        """Return what was learned, on the step as it is stored."""
        scale_OG = storable((self._first_OG1 * self._ratio_OG1)[..., 0], self._format.scale_dtype)
        codes_OI = self._codes().flatten(1)
        if self._zero_OG1 is not None:
            codes_OI = codes_OI + self._zero_OG1.expand_as(self._weight_OGK).flatten(1)
        return QuantizedTensor(codes_OI.to(self._format.code_dtype), scale_OG, self._zero_OG)

    def _codes(self) -> torch.Tensor:
        """Return the codes less zero points [O, G, K], as floats."""
        moved_OGK = (self._weight_OGK / self._ratio_OG1).add_(self._offset_OGK)
        return self._format.nearest_codes(moved_OGK, torch.ones_like(self._ratio_OG1), self._zero_OG1)


def outermost_step(grouped_OGK: torch.Tensor, weight_format: WeightFormat) -> torch.Tensor:
    """Return the float32 steps [O, G] on which each group's largest magnitude is the outermost, negative, code."""
    lowest_OG, highest_OG = grouped_OGK.amin(-1), grouped_OGK.amax(-1)
    largest_OG = torch.where(highest_OG > -lowest_OG, highest_OG, lowest_OG)
    return storable(-largest_OG / 2 ** (weight_format.bits - 1), weight_format.scale_dtype).float()
