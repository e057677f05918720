"""Frozen steps of layer inputs, computed offline from a replay of calibration text.

    step = reach / 127.5 (int8) or reach / 448 (float8_e4m3fn), reach = largest |x| over all tokens, or a percentile of |x|

Percentiles come from a histogram over the upper 16 bits of float32 magnitudes, whose bins are 0.8 % wide at most; a bin's
upper edge is taken. The walk holds one block and its histograms in memory; a killed one starts again.

Shape letters: N tokens of one sequence, I input features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from model_optimizer.artifacts.activation_scales import ActivationRanges, InputRange
from model_optimizer.artifacts.base import StageInputs, Tree
from model_optimizer.decisions import Decision
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.activations import REACH
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Progress
from model_optimizer.quantization.blocks import run_block
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.hidden_states import WalkJournal
from model_optimizer.quantization.layers import is_expert
from model_optimizer.quantization.preflight import announce
from model_optimizer.quantization.walk import Walk, close_streams, enter, open_streams, plan_walk

KIND = "activation-ranges"
STREAM = "inputs"
NUM_BINS = 2**15
"""Upper halves of non-negative float32 numbers, infinity and NaN included."""


class RangesInputs(StageInputs):
    """Everything that the replay reads. Free of any recipe, so that all static formats share one result."""

    model: Tree
    calibration: CalibrationSource
    num_sequences: int
    max_tokens: int
    percentile: float


def needs_ranges(plan: Mapping[str, str]) -> bool:
    """Return whether some layer of a plan wants a frozen step."""
    return any(FORMATS.get(name).activation == "static-tensor" for name in plan.values())


def refuse_experts(plan: Mapping[str, str]) -> None:
    """Refuse to round the inputs of single experts, which loaders keep fused.

    Raises:
        UnsupportedError: names such a layer.
    """
    for layer, name in plan.items():
        if FORMATS.get(name).activation is not None and is_expert(layer):
            raise UnsupportedError(
                f"{name} rounds the inputs of {layer}, an expert, which loaders keep fused with others and would not do; "
                "choose a format of weights alone for experts, e.g. int8-channel in quantization.layer_overrides"
            )


def measure_ranges(inputs: RangesInputs, workspace: Path, *, progress: Progress) -> ActivationRanges:
    """Return how far the input of every linear layer in the stack of decoder blocks reaches, in full precision.

    Raises:
        UnsupportedError: the architecture is not covered, or no linear layer lies in a stack of blocks.
        ConfigError: no usable calibration sample.
    """
    walk = plan_walk(inputs.model.path, inputs.calibration, inputs.num_sequences, inputs.max_tokens)
    announce(walk, 1, progress)
    found = _run(walk, inputs.percentile, workspace, progress)
    ranges = {layer.name: found[group[0].name] for group in walk.groups for layer in group}
    return ActivationRanges(ranges=ranges, percentile=inputs.percentile, num_tokens=walk.num_tokens)


def input_step(ranges: ActivationRanges, layer: str, format_name: str) -> torch.Tensor:
    """Return the frozen step of a layer's input, float32 [1].

    Raises:
        UnsupportedError: the layer was not on the walk, or saw nothing but zeros.
    """
    reach = ranges.ranges[layer].kept if layer in ranges.ranges else 0.0
    if not reach > 0:
        why = "saw nothing but zeros in calibration" if layer in ranges.ranges else "lies outside the stack of decoder blocks"
        raise UnsupportedError(
            f"{layer} {why}, so {format_name} has no step for its input; give other text, use a format with steps found on the "
            "spot (fp8-dynamic, w8a8-int8), or name the layer in quantization.skip_layers"
        )
    return torch.tensor([reach / REACH[FORMATS.get(format_name).code_dtype]], dtype=torch.float32)


def range_decision(ranges: ActivationRanges) -> Decision:
    """Say where frozen steps come from, and which layer's input sticks out most."""
    worst = max(ranges.ranges, key=lambda layer: ranges.ranges[layer].largest)
    return Decision(
        subject="frozen input steps",
        choice=f"percentile {ranges.percentile:g} of magnitudes seen in calibration",
        because=f"steps are frozen offline; the largest input enters {worst}",
        numbers={"num_tokens": float(ranges.num_tokens), "largest": ranges.ranges[worst].largest},
    )


class Magnitudes:
    """A histogram of |x|, filled piece by piece."""

    def __init__(self) -> None:
        self.largest = 0.0
        self._counts = torch.zeros(NUM_BINS, dtype=torch.int64)

    def add(self, values: torch.Tensor) -> None:
        """Count values of any shape."""
        if values.numel():
            magnitudes = values.detach().float().abs().flatten()
            self.largest = max(self.largest, magnitudes.max().item())
            self._counts += torch.bincount(magnitudes.view(torch.int32) >> 16, minlength=NUM_BINS).cpu()

    def percentile(self, percent: float) -> float:
        """Return a magnitude that at least `percent` of the values do not exceed; 100 = the largest, exactly."""
        if percent >= 100 or not self._counts.any():
            return self.largest
        reached = self._counts.cumsum(0) >= percent / 100 * self._counts.sum()
        edge = torch.tensor([(int(reached.int().argmax()) + 1) << 16], dtype=torch.int32).view(torch.float32).item()
        return min(edge, self.largest)


@contextmanager
def watched(modules: Mapping[str, nn.Module], magnitudes: Mapping[str, Magnitudes]) -> Iterator[None]:
    """Count what enters each module while the body runs."""
    handles = [module.register_forward_pre_hook(_counting(magnitudes[name])) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def request_peaks(model: nn.Module, layers: Sequence[str], tokens: Sequence[int]) -> dict[str, float]:
    """Return the largest input magnitude of each layer over one request's tokens."""
    magnitudes = {layer: Magnitudes() for layer in layers}
    with watched({layer: model.get_submodule(layer) for layer in layers}, magnitudes):
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    return {layer: seen.largest for layer, seen in magnitudes.items()}


def _counting(magnitudes: Magnitudes) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def count(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        magnitudes.add(arguments[0])

    return count


def _run(walk: Walk, percentile: float, workspace: Path, progress: Progress) -> dict[str, InputRange]:
    """Return the range of each group's input by the group's leader."""
    calls, (states,) = open_streams(walk, workspace, (STREAM,))
    enter((states,), workspace)
    found, num_blocks = {}, walk.stack.num_blocks
    for number in progress.track(range(num_blocks), "input ranges", num_blocks):
        magnitudes = {layer.name: Magnitudes() for layer in walk.leaders(number)}
        with walk.model.resident(number) as block:
            modules = {name: walk.model.layer(block, name) for name in magnitudes}
            with watched(modules, magnitudes), states.writing(number + 1) as writer:
                for hidden, call in zip(states.read(number), calls, strict=True):
                    writer.write(run_block(block, hidden, call[number]))
        for name, seen in magnitudes.items():
            found[name] = InputRange(largest=seen.largest, kept=seen.percentile(percentile))
    close_streams((states,), WalkJournal(workspace / "unused.json"))
    return found
