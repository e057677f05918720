"""Second moments of every linear layer's input, from one walk over calibration text in full precision.

    moment_II = X^T X / N over the N tokens of the walk

Methods that weigh rounding errors by what a layer really sees read them; half the Hessian of a layer's squared
output error is its moment. The walk goes block by block, so that one block's moments are in memory at a time, and
each finished block is on disk: a killed walk continues with the same numbers. Layers that read one input (q/k/v,
gate/up) share one moment, of which the lower triangle is stored.

Shape letters: I input features, T tokens of one sequence, D hidden features, N all tokens.
"""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import nn

from model_optimizer.artifacts.base import StageInputs, Tree
from model_optimizer.artifacts.moments import MomentPlace, Moments
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.protocols import Progress
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.layers import LinearLayer, read_layers, tie_groups
from model_optimizer.store import file_refs, write_atomically

log = logging.getLogger(__name__)

KIND = "moments"
STATE = "hidden.safetensors"
"""Hidden states between two blocks: the journal of the walk."""
FOLDER = "moments"
_BLOCK = re.compile(r"^(?P<list>.+?)\.(?P<index>\d+)\.")


class MomentsInputs(StageInputs):
    """Everything that the walk reads. Free of any recipe, so that all recipes of a model share one result."""

    model: Tree
    calibration: CalibrationSource
    num_sequences: int
    max_tokens: int


@dataclass(slots=True)
class _Call:
    """How the model calls one block for one sequence, the hidden states aside."""

    positional: tuple[object, ...]
    named: dict[str, object]


@dataclass(frozen=True, slots=True)
class _Walk:
    """The blocks, the layers to watch in each of them, and each block's call for every sequence."""

    blocks: tuple[nn.Module, ...]
    leaders: tuple[tuple[str, ...], ...]
    """Of each block: the first layer of every group that reads one input."""
    calls: tuple[tuple[_Call, ...], ...]
    """[block][sequence]"""


def measure_moments(inputs: MomentsInputs, workspace: Path, *, progress: Progress) -> Moments:
    """Write the second moment of the input of every linear layer in the stack of decoder blocks, block by block.

    Raises:
        UnsupportedError: the architecture is not covered, or no linear layer lies in a stack of blocks.
        ConfigError: no usable calibration sample.
    """
    layers = read_layers(inputs.model.path).linears
    stack, numbers = _stack(layers)
    groups = tie_groups(tuple(layer for layer in layers if layer.name in numbers))
    samples = prepare(inputs.calibration, inputs.model.path).samples[: inputs.num_sequences]
    sequences = tuple(tokens[: inputs.max_tokens] for tokens in samples)
    num_tokens = sum(map(len, sequences))
    model = load_dequantized(inputs.model.path).requires_grad_(False)
    blocks = tuple(model.get_submodule(stack).children())
    leaders = [[group[0].name for group in groups if numbers[group[0].name] == number] for number in range(len(blocks))]
    hidden_TD, calls = _calls(model, blocks, sequences)
    _run(_Walk(blocks, tuple(map(tuple, leaders)), calls), model, hidden_TD, workspace, progress)
    places = {
        layer.name: MomentPlace(file=_file(numbers[layer.name]), tensor=group[0].name, in_features=layer.in_features)
        for group in groups
        for layer in group
    }
    (workspace / STATE).unlink(missing_ok=True)
    return Moments(places=places, num_tokens=num_tokens, files=file_refs(workspace, workspace / FOLDER))


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
        lower = stream.get_tensor(place.tensor)
    moment_II = torch.zeros(place.in_features, place.in_features)
    rows, columns = torch.tril_indices(place.in_features, place.in_features)
    moment_II[rows, columns] = lower
    moment_II[columns, rows] = lower
    return moment_II


def _stack(layers: Sequence[LinearLayer]) -> tuple[str, dict[str, int]]:
    """Return the module list that holds most layers, and the block number of each layer in it."""
    found = [(match["list"], layer.name, int(match["index"])) for layer in layers if (match := _BLOCK.match(layer.name))]
    if not found:
        raise UnsupportedError(f"{layers[0].name} lies in no stack of decoder blocks, which input moments need; use method rtn")
    (stack, _), *_ = Counter(name for name, _, _ in found).most_common(1)
    return stack, {layer: number for name, layer, number in found if name == stack}


def _file(number: int) -> str:
    return f"{FOLDER}/block-{number:04}.safetensors"


@torch.no_grad()
def _calls(
    model: nn.Module, blocks: tuple[nn.Module, ...], sequences: Sequence[tuple[int, ...]]
) -> tuple[list[torch.Tensor], tuple[tuple[_Call, ...], ...]]:
    """Return the hidden states [1, T, D] that enter the first block, and how every block is called, per sequence.

    Each block stands aside while the model runs once: it hands on what it is given.
    """
    calls: list[list[_Call]] = [[] for _ in blocks]
    hidden_TD: list[torch.Tensor] = []

    def stand_in(number: int) -> object:
        def forward(hidden: torch.Tensor, *positional: object, **named: object) -> torch.Tensor:
            if number == 0:
                hidden_TD.append(hidden)
            calls[number].append(_Call(positional, named))
            return hidden

        return forward

    with _replaced({block: stand_in(number) for number, block in enumerate(blocks)}):
        for tokens in sequences:
            model(input_ids=torch.tensor([tokens]), use_cache=False)
    return hidden_TD, tuple(map(tuple, calls))


@contextmanager
def _replaced(forwards: Mapping[nn.Module, object]) -> Iterator[None]:
    """Let modules compute something else for a while; their own `forward` is the class's and is found again after."""
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]


@torch.no_grad()
def _run(walk: _Walk, model: nn.Module, hidden_TD: list[torch.Tensor], workspace: Path, progress: Progress) -> None:
    """Write every block's moments that the journal does not have yet."""
    first = _resume(workspace, hidden_TD)
    num_blocks, num_tokens = len(walk.blocks), sum(hidden.shape[1] for hidden in hidden_TD)
    for number in progress.track(range(first, num_blocks), "input moments", num_blocks - first):
        widths = {name: model.get_parameter(f"{name}.weight").shape[1] for name in walk.leaders[number]}
        sums_II = {name: torch.zeros(width, width) for name, width in widths.items()}
        handles = [model.get_submodule(name).register_forward_pre_hook(_add_to(sum_II)) for name, sum_II in sums_II.items()]
        for index, call in enumerate(walk.calls[number]):
            result = walk.blocks[number](hidden_TD[index], *call.positional, **call.named)
            hidden_TD[index] = result if isinstance(result, torch.Tensor) else result[0]
        for handle in handles:
            handle.remove()
        lower = {name: _lower(sum_II / num_tokens) for name, sum_II in sums_II.items()}
        write_atomically(workspace / _file(number), save(lower))
        if number + 1 < num_blocks:
            _save(workspace / STATE, hidden_TD, number + 1)


def _add_to(sum_II: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def add(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs_NI = arguments[0].reshape(-1, sum_II.shape[0])
        sum_II.addmm_(inputs_NI.T, inputs_NI)

    return add


def _lower(matrix_II: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.tril_indices(*matrix_II.shape)
    return matrix_II[rows, columns]


def _save(state: Path, hidden_TD: Sequence[torch.Tensor], next_block: int) -> None:
    """Write the hidden states so that a kill leaves the old journal or the new."""
    temporary = state.with_suffix(".part")
    tensors = {str(index): hidden.contiguous() for index, hidden in enumerate(hidden_TD)}
    save_file(tensors, temporary, metadata={"next_block": json.dumps(next_block)})
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.replace(state)


def _resume(workspace: Path, hidden_TD: list[torch.Tensor]) -> int:
    """Return the first block that is not done, with `hidden_TD` as it enters it; an unreadable journal is dropped."""
    state = workspace / STATE
    if not state.is_file():
        return 0
    try:
        with safe_open(state, framework="pt") as stream:
            next_block = int(json.loads(stream.metadata()["next_block"]))
            found = [stream.get_tensor(str(index)) for index in range(len(hidden_TD))]
        for number in range(next_block):
            with safe_open(workspace / _file(number), framework="pt"):
                pass
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        log.warning("the journal %s is unreadable (%s); the walk for input moments starts again", state, error)
        return 0
    hidden_TD[:] = found
    return next_block
