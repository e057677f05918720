"""What a calibrated walk will take, told before it starts: arithmetic over shapes, a short timing, a dry run of long ones."""

import time
from dataclasses import dataclass
from itertools import islice
from statistics import median

import torch

from model_optimizer.protocols import Progress
from model_optimizer.quantization.blocks import run_block
from model_optimizer.quantization.walk import Walk

PROBE_SIZE = 512
PROBE_TIMES = 9
FLOAT_BYTES = 4
ACTIVATION_COPIES = 6
"""Block-wide tensors of one sequence that live at once: normed input, q/k/v, gate, up, their product, residual."""
LONG_S = 180.0
"""Walks that seem longer are tried on two blocks first."""
DRY_BLOCKS = 2
PASSES_ALONG = 2
"""How often a block runs over the text when rounding is carried along."""


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
    hidden = entering[0]
    for number in blocks:
        with walk.model.resident(number) as block:
            hidden = run_block(block, hidden, calls[number])
    spent_s = time.perf_counter() - start
    return spent_s / len(blocks) * walk.stack.num_blocks * walk.num_tokens / len(sequence)
