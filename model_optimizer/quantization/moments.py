"""Second moments of every linear layer's input, from one walk over calibration text in full precision.

    moment_II = X^T X / N over the N tokens of the walk

Methods that weigh rounding errors by what a layer really sees read them; half the Hessian of a layer's squared
output error is its moment. The walk goes block by block, so that one block's weights and moments are in memory at a
time, and each finished block is on disk: a killed walk continues with the same numbers. Layers that read one input
(q/k/v, gate/up) share one moment, of which the lower triangle is stored; nothing where a layer saw nothing but zeros, as an
expert does that no token was sent to. The mean is over all tokens, also those that went to other experts.

Shape letters: I input features, T tokens of one sequence, D hidden features, N all tokens.
"""

import logging
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model_optimizer.artifacts.base import StageInputs, Tree
from model_optimizer.artifacts.moments import MomentPlace, Moments
from model_optimizer.disk import explained
from model_optimizer.errors import UnsupportedError
from model_optimizer.models.headers import read_header
from model_optimizer.protocols import Progress
from model_optimizer.quantization.blocks import coarse_products, run_block
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.hidden_states import WalkJournal
from model_optimizer.quantization.preflight import announce
from model_optimizer.quantization.unreached import is_unreached
from model_optimizer.quantization.walk import Walk, close_streams, enter, observed, open_streams, plan_walk
from model_optimizer.store import file_refs

log = logging.getLogger(__name__)

KIND = "moments"
STATE = "walk.json"
FOLDER = "moments"
STREAM = "hidden"


class MomentsInputs(StageInputs):
    """Everything that the walk reads. Free of any recipe, so that all recipes of a model share one result."""

    model: Tree
    calibration: CalibrationSource
    num_sequences: int
    max_tokens: int


def measure_moments(inputs: MomentsInputs, workspace: Path, *, progress: Progress) -> Moments:
    """Write the second moment of the input of every linear layer in the stack of decoder blocks, block by block.

    Raises:
        UnsupportedError: the architecture is not covered, or no linear layer lies in a stack of blocks.
        ConfigError: no usable calibration sample.
    """
    walk = plan_walk(inputs.model.path, inputs.calibration, inputs.num_sequences, inputs.max_tokens)
    announce(walk, 1, progress)
    _run(walk, workspace, progress)
    places = {
        layer.name: MomentPlace(file=_file(walk.stack.numbers[layer.name]), tensor=group[0].name, in_features=layer.in_features)
        for group in walk.groups
        for layer in group
    }
    empty = {
        header.name
        for number in range(walk.stack.num_blocks)
        for header in read_header(workspace / _file(number))
        if not header.num_bytes
    }
    return Moments(
        places=places,
        num_tokens=walk.num_tokens,
        unreached=tuple(layer for layer, place in places.items() if place.tensor in empty),
        files=file_refs(workspace, workspace / FOLDER),
    )


def read_moment(directory: Path, moments: Moments, layer: str) -> torch.Tensor:
    """Return the symmetric float32 moment [I, I] of a layer's input.

    Raises:
        UnsupportedError: the layer lies outside the stack of decoder blocks, hence was not on the walk.
    """
    if layer not in moments.places:
        raise UnsupportedError(
            f"{layer} lies outside the stack of decoder blocks, so its inputs were not seen; use a method that needs no data "
            "(rtn), or name the layer in quantization.skip_layers"
        )
    place = moments.places[layer]
    with safe_open(directory / place.file, framework="pt") as stream:
        return _square(stream.get_tensor(place.tensor), place.in_features)


def _run(walk: Walk, workspace: Path, progress: Progress) -> None:
    """Write every block's moments that the journal does not have yet."""
    calls, (states,) = open_streams(walk, workspace, (STREAM,))
    journal, num_blocks, device = WalkJournal(workspace / STATE), walk.stack.num_blocks, walk.model.device
    first = journal.resume((states,)) or 0
    if not all(_readable(workspace / _file(number)) for number in range(first)):
        log.warning("moments of blocks that the journal %s calls done are unreadable; the walk starts again", journal.path)
        first = 0
    if first == 0:
        enter((states,), workspace)
    for number in progress.track(range(first, num_blocks), "input moments", num_blocks - first):
        leaders = walk.leaders(number)
        sums_II = {layer.name: torch.zeros(layer.in_features, layer.in_features, device=device) for layer in leaders}
        with walk.model.resident(number) as block:
            modules = {name: walk.model.layer(block, name) for name in sums_II}
            with coarse_products(), observed(modules, sums_II), states.writing(number + 1) as writer:
                for hidden, call in zip(states.read(number), calls, strict=True):
                    writer.write(run_block(block, hidden.to(device), call[number]))
        save_moments(workspace / _file(number), {name: sum_II.div_(walk.num_tokens).cpu() for name, sum_II in sums_II.items()})
        journal.advance(number + 1, {STREAM: writer.checksum})
    close_streams((states,), journal)


def _file(number: int) -> str:
    return f"{FOLDER}/block-{number:04}.safetensors"


def _readable(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def save_moments(path: Path, moments_II: dict[str, torch.Tensor]) -> None:
    """Write the lower triangles so that a reader sees all of them or none; the squares are given up one by one."""
    lower = {}
    for name in list(moments_II):
        moment_II = moments_II.pop(name)
        lower[name] = torch.empty(0) if is_unreached(moment_II) else _lower(moment_II)
    temporary = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with explained(path.parent):
        save_file(lower, temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)


def _lower(matrix_II: torch.Tensor) -> torch.Tensor:
    """Return the lower triangle, row after row."""
    size = len(matrix_II)
    lower, at = torch.empty(size * (size + 1) // 2), 0
    for row in range(size):
        lower[at : at + row + 1] = matrix_II[row, : row + 1]
        at += row + 1
    return lower


def _square(lower: torch.Tensor, size: int) -> torch.Tensor:
    """Return the symmetric matrix of a lower triangle. Law: `_square(_lower(m), len(m)) == m` for symmetric m."""
    if not len(lower):
        return torch.zeros(size, size)
    matrix_II, at = torch.empty(size, size), 0
    for row in range(size):
        values = lower[at : at + row + 1]
        matrix_II[row, : row + 1] = values
        matrix_II[: row + 1, row] = values
        at += row + 1
    return matrix_II
