"""What rounding changes in every layer in every format: made once, then read from disk for every batch of text.

Rounding all layers in seven formats costs a CPU several times what the text of a batch does (SmolLM2-135M, one core, 256
tokens: 73 s of 118), reading the result about a second. Files are mapped, not copied: 6.5 ms instead of 21 for the projections
of a layer of 1536 x 576 in nine formats. A GPU rounds faster than a disk reads, and what would not fit the
disk is rounded anew as well; the numbers are the same.

Shape letters: O output features, I input features, F formats.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from model_optimizer.disk import explained
from model_optimizer.formats.registry import FORMATS

FOLDER = "errors"
MOST_BYTES = 32 * 2**30
"""Files above this are not written; only a model of more than a billion parameters needs them so large."""


@dataclass(frozen=True, slots=True)
class RoundingErrors:
    """rounded - weight of the layers of one model, from memory to memory or by way of a folder."""

    weight_of: Callable[[str], torch.Tensor]
    """Gives a layer's weight [O, I]."""
    formats: tuple[str, ...]
    folder: Path | None
    """None = rounded anew each time."""

    def of(self, layer: str) -> torch.Tensor:
        """Return the errors [O, I, F] of a layer, in the order of `formats`."""
        if self.folder is None:
            return self._round(layer)
        path, shape = self.folder / f"{layer}.bin", self.folder / f"{layer}.shape"
        if not path.is_file():
            errors_OIF = self._round(layer)
            shape.write_text(" ".join(map(str, errors_OIF.shape)))
            self._write(path, errors_OIF)
        sizes = tuple(map(int, shape.read_text().split()))
        return torch.from_file(str(path), shared=False, size=math.prod(sizes), dtype=torch.float32).reshape(sizes)

    def _round(self, layer: str) -> torch.Tensor:
        weight_OI = self.weight_of(layer).detach().float()
        return torch.stack([FORMATS.get(name).round_trip(weight_OI) - weight_OI for name in self.formats], dim=-1)

    def _write(self, path: Path, errors_OIF: torch.Tensor) -> None:
        """Write a file that is whole or absent; a lost one is made again, so that nothing waits for the disk."""
        partial = path.with_suffix(".part")
        with explained(path.parent):
            errors_OIF.numpy().tofile(partial)
            partial.replace(path)


@contextmanager
def rounding_errors(
    weight_of: Callable[[str], torch.Tensor], formats: tuple[str, ...], workspace: Path, num_weights: int
) -> Iterator[RoundingErrors]:
    """Give the errors of a model's layers while the body runs; files under `workspace` go when it ends, not when it is killed.

    Raises:
        StorageError: the disk is full.
    """
    folder, num_bytes = workspace / FOLDER, 4 * len(formats) * num_weights
    if torch.cuda.is_available() or num_bytes > min(MOST_BYTES, _free_bytes(workspace) // 2):
        yield RoundingErrors(weight_of, formats, None)
        return
    folder.mkdir(parents=True, exist_ok=True)
    yield RoundingErrors(weight_of, formats, folder)
    shutil.rmtree(folder, ignore_errors=True)


def _free_bytes(workspace: Path) -> int:
    workspace.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(workspace).free
