"""Quantize along the walk: each block is measured on what the quantized blocks before it give, not on the full model's states.

With moments of the quantized prefix's outputs X' each layer comes near its own full-precision output on them,
min |X' W^T - X' Q^T|^2. A block is visited, quantized and visited again with its rounded weights, whose outputs enter the
next one. Layers are on disk as soon as they are rounded, states once a block is done: a killed walk continues with the
same numbers.

Not the default. Measured on SmolLM2-135M (16 x 256 tokens of wikitext2-valid, KL over 4,096 of wikitext2-test in eight
pieces): int3-g64 0.395 nats on the full model's states, 0.373 so (less in 6 pieces); int4-g64 0.110 and 0.114 (more in 5).

Source: Frantar et al. 2022, GPTQ (block by block on quantized inputs).

Shape letters: O output features, I input features, N tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.base import QuantizedTensor, WeightFormat
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Progress
from model_optimizer.quantization.blocks import Call, coarse_products, run_block
from model_optimizer.quantization.hidden_states import States, WalkJournal
from model_optimizer.quantization.layers import LinearLayer
from model_optimizer.quantization.methods.base import Method
from model_optimizer.quantization.parts import Parts, alike, finish
from model_optimizer.quantization.squares import mirror
from model_optimizer.quantization.unreached import is_unreached, quantize_reached, recall, remember
from model_optimizer.quantization.walk import Walk, close_streams, enter, observed, open_streams

log = logging.getLogger(__name__)

PREFIX = "prefix"
STATE = "propagation.json"
UNREACHED = "unreached.json"


@dataclass(frozen=True, slots=True)
class Propagation:
    """What a quantizing walk needs."""

    walk: Walk
    plan: Mapping[str, str]
    """Layer -> format name."""
    method: Method
    parts: Parts

    def groups(self, block: int) -> tuple[tuple[LinearLayer, ...], ...]:
        """Return the groups of a block of which some layer is planned on a grid."""
        found = (group for group in self.walk.groups if self.walk.stack.numbers[group[0].name] == block)
        return tuple(group for group in found if any(FORMATS.get(self.plan[layer.name]).on_grid for layer in group))


def quantize_along(run: Propagation, workspace: Path, progress: Progress) -> tuple[str, ...]:
    """Put every planned layer of the stack into `run.parts`, block by block; return those that no input reached.

    Raises:
        UnsupportedError: a layer that is planned on a grid lies outside the stack of decoder blocks.
    """
    refuse_outside(run.walk, run.plan)
    calls, streams = open_streams(run.walk, workspace, (PREFIX,))
    journal, num_blocks = WalkJournal(workspace / STATE), run.walk.stack.num_blocks
    first = journal.resume(streams) or 0
    if not _are_finished(run, first):
        log.warning("layers that the journal %s calls done are gone; the walk starts again and makes them", journal.path)
        first = 0
    if first == 0:
        (workspace / UNREACHED).unlink(missing_ok=True)
        enter(streams, workspace)
    for number in progress.track(range(first, num_blocks), "quantize", num_blocks - first):
        of_block = [call[number] for call in calls]
        with run.walk.model.resident(number) as block:
            remember(workspace / UNREACHED, _round(run, number, block, _visit(run, number, block, streams[0], of_block)))
            checksum = _pass(run, number, block, streams[0], of_block)
        journal.advance(number + 1, {PREFIX: checksum})
    close_streams(streams, journal)
    unreached = recall(workspace / UNREACHED)
    (workspace / UNREACHED).unlink(missing_ok=True)
    return unreached


def _are_finished(run: Propagation, num_blocks: int) -> bool:
    """Return whether every planned layer of the first blocks is there."""
    groups = [group for number in range(num_blocks) for group in run.groups(number)]
    made = [(layer.name, name) for group in groups for name, layers in alike(group, run.plan) for layer in layers]
    return all(run.parts.read(layer, name) is not None for layer, name in made)


def refuse_outside(walk: Walk, plan: Mapping[str, str]) -> None:
    """Refuse a plan that asks for a layer that no walk visits.

    Raises:
        UnsupportedError: a layer that is planned on a grid lies outside the stack of decoder blocks.
    """
    for layer, name in plan.items():
        if FORMATS.get(name).on_grid and layer not in walk.stack.numbers:
            raise UnsupportedError(
                f"{layer} lies outside the stack of decoder blocks, so the walk does not reach it; use a method that needs no "
                "data (rtn), or name the layer in quantization.skip_layers"
            )


def _visit(run: Propagation, number: int, block: nn.Module, states: States, calls: Sequence[Call]) -> dict[str, torch.Tensor]:
    """Return what a block's leading layers see before any of them is rounded: the lower triangle of X'^T X', by layer."""
    leaders = [group[0] for group in run.groups(number)]
    modules = {layer.name: run.walk.model.layer(block, layer.name) for layer in leaders}
    device = run.walk.model.device
    sums_II = {layer.name: torch.zeros(layer.in_features, layer.in_features, device=device) for layer in leaders}
    with coarse_products(), observed(modules, sums_II):
        for hidden, call in zip(states.read(number), calls, strict=True):
            run_block(block, hidden.to(device), call)
    return sums_II


def _round(run: Propagation, number: int, block: nn.Module, sums_II: dict[str, torch.Tensor]) -> list[str]:
    """Quantize the planned layers of a block, let it compute with the rounded weights, return those that no input reached."""
    unreached = []
    for group in run.groups(number):
        leader = group[0].name
        moment_II = mirror(sums_II.pop(leader)).div_(run.walk.num_tokens)
        if is_unreached(moment_II):
            unreached += [layer.name for layer in group]

        def method(_: str, weight_OI: torch.Tensor, weight_format: WeightFormat) -> QuantizedTensor:
            return quantize_reached(run.method, weight_OI, weight_format, moment_II)  # noqa: B023

        def read(layer: str) -> torch.Tensor:
            weight_OI: torch.Tensor = run.walk.model.layer(block, layer).get_parameter("weight")
            return weight_OI

        for format_name, layers in alike(group, run.plan):
            finish(run.parts, layers, format_name, read, method)
            for layer in layers:
                tensor = run.parts.read(layer.name, format_name)
                assert tensor is not None, f"{layer.name} was finished and is gone"
                rounded_OI = FORMATS.get(format_name).dequantize(tensor.to(run.walk.model.device))
                module = run.walk.model.layer(block, layer.name)
                module.load_state_dict({"weight": rounded_OI}, strict=False, assign=True)
    return unreached


def _pass(run: Propagation, number: int, block: nn.Module, states: States, calls: Sequence[Call]) -> int:
    """Write the states that leave a block, and return their checksum."""
    with coarse_products(), states.writing(number + 1) as writer:
        for hidden, call in zip(states.read(number), calls, strict=True):
            writer.write(run_block(block, hidden.to(run.walk.model.device), call))
    return writer.checksum
