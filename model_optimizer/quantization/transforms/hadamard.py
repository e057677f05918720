"""Randomised Hadamard rotations of any width: random signs, then a Hadamard matrix of 2^k times a small orthogonal one.

    R = diag(signs) (H_(2^k) / 2^(k/2)  kron  Q_m),  width = 2^k m with m odd;  x -> x R

Rotating with orthogonal R spreads outliers over all channels, so that a group's largest magnitude comes closer to its mean.
Never a dense width x width matrix: a row costs width (k + m) operations.

Source: Ashkboos et al. 2024, QuaRot, section 3 (randomised Hadamard); Q_m is the orthogonal factor of a Gaussian matrix.

Shape letters: D rotated channels, N rows, P power-of-two part, M odd part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

CHUNK_ELEMENTS = 2**22
"""Float64 values that are rotated at once."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal matrix R [D, D] in factors, float64."""

    signs_D: torch.Tensor
    odd_MM: torch.Tensor

    @classmethod
    def random(cls, width: int, seed: int) -> Self:
        """Return the rotation of a width that `seed` draws."""
        generator = torch.Generator().manual_seed(seed)
        signs_D = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
        odd = width
        while odd % 2 == 0:
            odd //= 2
        factor_MM, upper_MM = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64))
        return cls(signs_D, factor_MM * upper_MM.diagonal().sign())

    @property
    def width(self) -> int:
        return len(self.signs_D)

    def forward(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Return X R, float32; any shape whose last dimension is a multiple of the width, each part rotated by itself."""
        return self._chunked(rows_ND, lambda part_ND: self._spread(part_ND * self.signs_D, self.odd_MM))

    def backward(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Return X R^T. Law: `backward(forward(x)) == x` to float32 rounding."""
        return self._chunked(rows_ND, lambda part_ND: self._spread(part_ND, self.odd_MM.T) * self.signs_D)

    def _chunked(self, rows: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        flat_ND = rows.reshape(-1, self.width)
        step = max(1, CHUNK_ELEMENTS // self.width)
        parts = [rotate(flat_ND[at : at + step].double()).float() for at in range(0, len(flat_ND), step)]
        return torch.cat(parts).reshape(rows.shape)

    def _spread(self, rows_ND: torch.Tensor, odd_MM: torch.Tensor) -> torch.Tensor:
        """Multiply by H kron Q; H is symmetric, so that its transpose is itself."""
        power = self.width // len(odd_MM)
        mixed_NPM = rows_ND.reshape(-1, power, len(odd_MM)) @ odd_MM
        half = 1
        while half < power:
            pairs = mixed_NPM.reshape(len(rows_ND), power // (2 * half), 2, -1)
            mixed_NPM = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
            half *= 2
        spread_ND: torch.Tensor = mixed_NPM.reshape(rows_ND.shape) / power**0.5
        return spread_ND
