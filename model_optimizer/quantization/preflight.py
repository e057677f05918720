"""What a calibrated walk will take, told before it starts: arithmetic over shapes, a short timing, a dry run of long ones."""

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import torch

from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Progress
from model_optimizer.quantization.blocks import find_stack, run_block
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.layers import LinearLayer, input_groups
from model_optimizer.quantization.registry import METHODS
from model_optimizer.quantization.walk import Walk

PROBE_SIZE = 512
PROBE_TIMES = 9
FLOAT_BYTES = 4
ACTIVATION_COPIES = 6
"""Block-wide tensors of one sequence that live at once: normed input, q/k/v, gate, up, their product, residual."""
LONG_S = 180.0
"""Walks that seem longer are tried on two blocks first."""
DRY_BLOCKS = 2
ROUNDING_COPIES = 6
PIECE_WEIGHTS = 2**23
"""Rounding without data holds a few copies of a piece of this many weights. Source: data_free.PIECE_ELEMENTS."""
PASSES_ALONG = 2
"""How often a block runs over the text when rounding is carried along."""


SENSITIVITY_PASSES = 3
"""Forward, and a backward that costs twice as much. Source: 6 flops per weight and token in training (Kaplan et al. 2020)."""
PROBE_SHAPE = (256, 512)
"""Outputs and inputs of the matrix that a method is timed on."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a quantization will take, before any weight is read; arithmetic, times what this machine just did."""

    seconds: dict[str, float]
    """By step: `sensitivity`, `moments`, `tuning`, `rounding`."""
    peak_bytes: int
    """What memory grows by over the idle process."""
    checkpoint_bytes: int
    """Quantized layers as stored; embedding, head and norms come on top."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def forecast(layers: tuple[LinearLayer, ...], recipe: WeightRecipe, config: QuantizationConfig | None) -> Forecast:
    """Return what a recipe will take; without `config` it is rounded without data, a few rows at a time.

    Samples are counted as full: shorter text takes less.
    """
    weights = sum(layer.num_weights for layer in layers)
    sizes = {name: sum(FORMATS.get(name).num_bytes(it.out_features, it.in_features) for it in layers) for name in recipe.formats}
    stored = int(recipe.bits_budget * weights / 8) if recipe.bits_budget else sizes[recipe.formats[0]]
    moments = METHODS.get(recipe.method).needs_moments
    seconds = {"rounding": rounding_s(layers, recipe)}
    if config is None:
        return Forecast(seconds, ROUNDING_COPIES * FLOAT_BYTES * PIECE_WEIGHTS, stored)
    rate = measure_flops_per_s()
    seconds["sensitivity"] = 2.0 * SENSITIVITY_PASSES * weights * config.sensitivity_sequences * config.sensitivity_tokens / rate
    if recipe.method == "signround":
        tokens = PASSES_ALONG * config.tuning_sequences + SENSITIVITY_PASSES * config.tuning_steps * config.tuning_batch
        seconds["tuning"] = 2.0 * weights * tokens * config.tuning_tokens / rate
    squares = sum(group[0].in_features ** 2 for group in input_groups(layers))
    if moments:
        seconds["moments"] = (2.0 * weights + squares) * config.moments_sequences * config.moments_tokens / rate
    block = FLOAT_BYTES * (weights + squares * moments) // find_stack(layers).num_blocks
    return Forecast(seconds, max(FLOAT_BYTES * weights, block), stored)


def rounding_s(layers: tuple[LinearLayer, ...], recipe: WeightRecipe) -> float:
    """Return the seconds that the method rounds for, from one small matrix timed here.

    A method with moments I x I costs O I^2 + I^3, any other O I.
    """
    method, weight_format = METHODS.get(recipe.method), FORMATS.get(recipe.formats[0])
    height, width = PROBE_SHAPE
    weight_OI = torch.linspace(-1, 1, height * width).reshape(height, width)
    moment_II = torch.eye(width) if method.needs_moments else None
    times = []
    for _ in range(2):
        start = time.perf_counter()
        method.quantize(weight_OI, weight_format, moment_II)
        times.append(time.perf_counter() - start)

    def work(out_features: int, in_features: int) -> int:
        return out_features * in_features**2 + in_features**3 if method.needs_moments else out_features * in_features

    return min(times) / work(height, width) * sum(work(layer.out_features, layer.in_features) for layer in layers)


@dataclass(frozen=True, slots=True)
class WalkEstimate:
    """Predicted cost of one walk."""

    flops: float
    """Passes and moments of all blocks, multiply and add counted apart; attention scores are left out."""
    seconds: float
    block_bytes: int
    """Weights, moments and activations of the mean block: what memory grows by over the idle process."""


def estimate_walk(walk: Walk, num_passes: int, flops_per_s: float) -> WalkEstimate:
    """Return the cost of a walk that runs every block `num_passes` times over the text.

    Source: 2 x weights flops per token and pass; half a moment of I inputs costs I^2 per token.
    """
    weights = sum(layer.num_weights for group in walk.groups for layer in group)
    squares = sum(group[0].in_features ** 2 for group in walk.groups)
    widest = max(max(layer.in_features, layer.out_features) for group in walk.groups for layer in group)
    longest = max(map(len, walk.sequences))
    flops = float(walk.num_tokens) * (2 * num_passes * weights + squares)
    resident = FLOAT_BYTES * (weights + squares) // walk.stack.num_blocks
    return WalkEstimate(flops, flops / flops_per_s, resident + FLOAT_BYTES * ACTIVATION_COPIES * longest * widest)


def measure_flops_per_s() -> float:
    """Return how many float32 operations per second a matrix product gets here and now; the median of a few, milliseconds."""
    left = torch.full((PROBE_SIZE, PROBE_SIZE), 0.5)
    times = []
    for _ in range(PROBE_TIMES):
        start = time.perf_counter()
        left @ left
        times.append(time.perf_counter() - start)
    return 2.0 * PROBE_SIZE**3 / median(times)


def announce(walk: Walk, num_passes: int, progress: Progress) -> WalkEstimate:
    """Tell what the walk will take, and return it; a long one is tried on the longest sequence and two blocks first."""
    estimate = estimate_walk(walk, num_passes, measure_flops_per_s())
    size = f"{walk.stack.num_blocks} blocks x {walk.num_tokens} tokens, {estimate.flops / 1e12:.3g} TFLOP"
    memory = f"about {estimate.block_bytes / 2**20:.0f} MiB for one block at a time"
    progress.note(f"calibration walk: {size}, about {estimate.seconds:.0f} s by arithmetic; {memory}")
    if estimate.seconds > LONG_S:
        seconds = dry_run_s(walk) * num_passes
        progress.note(f"a dry run of {DRY_BLOCKS} blocks says about {seconds:.0f} s for the walk; rounding comes on top")
        return WalkEstimate(estimate.flops, seconds, estimate.block_bytes)
    return estimate


def dry_run_s(walk: Walk) -> float:
    """Return the seconds of one pass over all blocks and tokens, from the longest sequence through the first two blocks."""
    sequence = max(walk.sequences, key=len)
    entering: list[torch.Tensor] = []
    (calls,) = walk.model.capture([sequence], lambda _, hidden: entering.append(hidden))
    blocks = tuple(islice(range(walk.stack.num_blocks), DRY_BLOCKS))
    start = time.perf_counter()
    hidden = entering[0].to(walk.model.device)
    for number in blocks:
        with walk.model.resident(number) as block:
            hidden = run_block(block, hidden, calls[number])
    spent_s = time.perf_counter() - start
    return spent_s / len(blocks) * walk.stack.num_blocks * walk.num_tokens / len(sequence)


def forecast_gguf(model: Path, recipe: str) -> Forecast:
    """Return what a GGUF export will take, each block type timed on a few rows; moments, if asked for, come on top.

    Raises:
        ConfigError: an unknown recipe.
        UnsupportedError: an architecture that the export does not cover.
    """
    from model_optimizer.formats.gguf.registry import BLOCKS
    from model_optimizer.formats.gguf.writer import PIECE_WEIGHTS as GGUF_PIECE
    from model_optimizer.formats.gguf.writer import planned_types

    weights, num_bytes = planned_types(model, recipe)
    seconds = 0.0
    for name, count in weights.items():
        rows_RI = torch.linspace(-1, 1, PROBE_SHAPE[0] * PROBE_SHAPE[1]).reshape(PROBE_SHAPE).numpy()
        start = time.perf_counter()
        BLOCKS.get(name).quantize(rows_RI)
        seconds += (time.perf_counter() - start) / rows_RI.size * count
    return Forecast({"rounding": seconds}, ROUNDING_COPIES * FLOAT_BYTES * GGUF_PIECE, num_bytes)
