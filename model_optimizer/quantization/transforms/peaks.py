"""Largest magnitude of every channel that enters a layer, from one streamed walk; journalled block by block.

Shape letters: I input features.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from model_optimizer.quantization.blocks import run_block
from model_optimizer.quantization.hidden_states import WalkJournal
from model_optimizer.quantization.preflight import announce
from model_optimizer.quantization.transforms.base import Job
from model_optimizer.quantization.walk import close_streams, enter, open_streams, plan_walk
from model_optimizer.store import write_atomically

STATE = "peaks.json"
STREAM = "peaks"


def measure_peaks(job: Job, layers: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return max |x| [I] of what enters each layer over the calibration text; a killed walk continues with the same numbers."""
    walk = plan_walk(job.inputs.model.path, job.inputs.calibration, job.inputs.num_sequences, job.inputs.max_tokens)
    announce(walk, 1, job.progress)
    calls, (states,) = open_streams(walk, job.workspace, (STREAM,))
    journal, num_blocks = WalkJournal(job.workspace / STATE), walk.stack.num_blocks
    peaks = _read(job)
    first = journal.resume((states,)) or 0
    if any(layer not in peaks for layer in layers if walk.stack.numbers[layer] < first):
        first = 0
    if first == 0:
        peaks = {}
        enter((states,), job.workspace)
    for number in job.progress.track(range(first, num_blocks), "input peaks", num_blocks - first):
        here = {layer: torch.zeros(0) for layer in layers if walk.stack.numbers[layer] == number}
        with walk.model.resident(number) as block:
            modules = {layer: walk.model.layer(block, layer) for layer in here}
            with _observed(modules, here), states.writing(number + 1) as writer:
                for hidden, call in zip(states.read(number), calls, strict=True):
                    writer.write(run_block(block, hidden, call[number]))
        peaks |= here
        write_atomically(job.workspace / f"{STREAM}.safetensors", save(peaks))
        journal.advance(number + 1, {STREAM: writer.checksum})
    close_streams((states,), journal)
    return peaks


def _read(job: Job) -> dict[str, torch.Tensor]:
    try:
        return load((job.workspace / f"{STREAM}.safetensors").read_bytes())
    except (FileNotFoundError, SafetensorError):
        return {}


@contextmanager
def _observed(modules: Mapping[str, nn.Module], peaks: dict[str, torch.Tensor]) -> Iterator[None]:
    """Raise each layer's peaks to the largest magnitudes that enter it while the body runs."""
    handles = [module.register_forward_pre_hook(_raise(name, peaks)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _raise(name: str, peaks: dict[str, torch.Tensor]) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def add(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        peak_I = arguments[0].reshape(-1, arguments[0].shape[-1]).abs().amax(0)
        peaks[name] = torch.maximum(peaks[name], peak_I) if len(peaks[name]) else peak_I

    return add
