"""A calibrated walk: a streamed model, the text it reads, the states between blocks, and what enters its layers.

Shape letters: I input features, T tokens of one sequence, D hidden features, N tokens of one sequence as rows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from model_optimizer.disk import explained
from model_optimizer.models.shards import as_bytes
from model_optimizer.quantization.blocks import Call, Stack, StreamedModel, find_stack
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.hidden_states import DeviceStates, HiddenStates, States, WalkJournal
from model_optimizer.quantization.layers import LinearLayer, input_groups, read_layers
from model_optimizer.quantization.squares import add_square

FLOAT_BYTES = 4
ENTERING = "entering.part"
"""What enters block 0: the start of every stream."""


@dataclass(frozen=True, slots=True)
class Walk:
    """A streamed model, the text it reads, and which layers share an input."""

    model: StreamedModel
    stack: Stack
    groups: tuple[tuple[LinearLayer, ...], ...]
    """Layers of the stack that read one input; the first of each group leads it."""
    sequences: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    def leaders(self, block: int) -> tuple[LinearLayer, ...]:
        """Return the layer that leads each group of a block."""
        return tuple(group[0] for group in self.groups if self.stack.numbers[group[0].name] == block)


def plan_walk(model: Path, calibration: CalibrationSource, num_sequences: int, max_tokens: int) -> Walk:
    """Return what a walk over the leading tokens of the calibration samples goes through; no weight is read.

    Raises:
        UnsupportedError: the architecture is not covered, or no linear layer lies in a stack of blocks.
        ConfigError: no usable calibration sample.
    """
    samples = prepare(calibration, model).samples[:num_sequences]
    return walk_over(model, tuple(tokens[:max_tokens] for tokens in samples))


def walk_over(model: Path, sequences: tuple[tuple[int, ...], ...]) -> Walk:
    """Return what a walk over these sequences goes through; no weight is read.

    Raises:
        UnsupportedError: the architecture is not covered, or no linear layer lies in a stack of blocks.
    """
    layers = read_layers(model).linears
    stack = find_stack(layers)
    groups = input_groups(tuple(layer for layer in layers if layer.name in stack.numbers))
    return Walk(StreamedModel(model, stack), stack, groups, sequences)


def open_streams(walk: Walk, workspace: Path, names: tuple[str, ...]) -> tuple[list[tuple[Call, ...]], tuple[States, ...]]:
    """Return each sequence's calls, and streams of hidden states that all hold what enters block 0 once `enter` has run."""
    workspace.mkdir(parents=True, exist_ok=True)
    lengths = tuple(map(len, walk.sequences))
    scratch = workspace / ENTERING
    width = 0
    with explained(workspace), scratch.open("wb") as stream:

        def take(index: int, hidden: torch.Tensor) -> None:
            nonlocal width
            width = hidden.shape[-1]
            stream.write(as_bytes(hidden.cpu()))

        calls = walk.model.capture(walk.sequences, take)
    device = walk.model.device
    if _has_room(device, 2 * len(names) * width * sum(lengths) * FLOAT_BYTES):
        return calls, tuple(DeviceStates(name, lengths, width, device) for name in names)
    return calls, tuple(HiddenStates(workspace, name, lengths, width) for name in names)


def _has_room(device: torch.device, num_bytes: int) -> bool:
    """Return whether the streams, two sets of states each, take at most a quarter of a GPU's free memory."""
    return device.type == "cuda" and 4 * num_bytes <= torch.cuda.mem_get_info(device)[0]


def enter(streams: tuple[States, ...], workspace: Path) -> None:
    """Let every stream begin with what `open_streams` captured."""
    for stream in streams:
        stream.begin(workspace / ENTERING)


def close_streams(streams: tuple[States, ...], journal: WalkJournal) -> None:
    """Remove what only a killed walk would need."""
    journal.remove()
    (journal.path.parent / ENTERING).unlink(missing_ok=True)
    for stream in streams:
        stream.remove()


@contextmanager
def observed(modules: Mapping[str, nn.Module], sums_II: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Add X^T X of what enters each module to the lower triangle of its sum while the body runs."""
    handles = [module.register_forward_pre_hook(_add_to(sums_II[name])) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_to(sum_II: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def add(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs_NI = arguments[0].reshape(-1, sum_II.shape[0])
        if len(inputs_NI):
            add_square(sum_II, inputs_NI)

    return add
