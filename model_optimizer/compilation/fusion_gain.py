"""What each fusion gains here: the graph with all of them against the graph without that one, step by step in turn."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import psutil

from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from model_optimizer.compilation.external_data import MODEL
from model_optimizer.compilation.fusion import Fusion, fuse
from model_optimizer.compilation.worker import BuildSpec
from model_optimizer.errors import ConfigError
from model_optimizer.measurement.interleave import interleave
from model_optimizer.measurement.paired import ratio_of_pairs
from model_optimizer.runtimes.backends.onnxruntime import open_model
from model_optimizer.runtimes.decoder_model import ModelInput

SESSIONS = 3
"""Two engines are open at once, and packing their weights takes up to a copy of one. Source: ONNX Runtime packs at load."""
GIB = 2**30
PROMPT_TOKENS = 64
STEPS = 4
"""Decode steps of one round: long enough to be timed, short enough that the machine's mood holds."""


def measured_gains(plain: onnx.ModelProto, folder: Path, fusions: Sequence[Fusion], spec: BuildSpec) -> tuple[Measure, ...]:
    """Return one ratio for each fusion: time of a decode step without it over time with it; above 1 it helps.

    `plain` is the graph before any fusion, its data file in `folder`; the finished engine lies in `spec.output`.
    """
    if not spec.gain_rounds:
        return tuple(_unmeasured(fusion, "compile.fusion_rounds is 0") for fusion in fusions)
    needed, free = SESSIONS * sum(path.stat().st_size for path in folder.iterdir()), psutil.virtual_memory().available
    if needed > free:
        reason = f"two engines at once take about {needed / GIB:.1f} GiB and {free / GIB:.1f} are free"
        return tuple(_unmeasured(fusion, reason) for fusion in fusions)
    found = []
    for fusion in fusions:
        others = [it for it in fusions if it.name != fusion.name]
        with tempfile.TemporaryDirectory(dir=spec.output) as name:
            without, _ = fuse(plain, folder, others, Path(name))
            onnx.save(without, Path(name) / MODEL)
            found.append(_gain(fusion, Path(name), spec))
    return tuple(found)


def _gain(fusion: Fusion, without: Path, spec: BuildSpec) -> Measure:
    arms = {name: _stepper(folder) for name, folder in {"with": spec.output / "engine", "without": without}.items()}
    for arm in arms.values():
        arm(0)
    times = interleave(arms, spec.gain_rounds)
    try:
        ratio = ratio_of_pairs(times["without"], times["with"], seed=0)
    except ConfigError as error:
        return _unmeasured(fusion, str(error))
    return Measure(
        name=_name(fusion),
        dimension=Dimension.SPEED,
        unit="ratio",
        value=ratio.value,
        interval=ratio.interval,
        limit=1.0,
        higher_is_better=True,
        num_samples=ratio.num_pairs,
        reason=f"decode steps without this fusion over with it, batch 1, from {PROMPT_TOKENS} cached tokens on, interleaved",
    )


def _stepper(engine: Path) -> Callable[[int], float]:
    """Return what decodes `STEPS` tokens from the same cache on, and says how many seconds that took."""
    model, _ = open_model(engine)
    prompt_BS = np.arange(PROMPT_TOKENS)[None] % model.vocab_size

    def run(number: int) -> float:
        _, cache = model.forward(ModelInput(prompt_BS, np.ones_like(prompt_BS), prompt_BS, PROMPT_TOKENS - 1), None)
        start = time.perf_counter()
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + STEPS):
            one = np.ones((1, 1), np.int64)
            _, cache = model.forward(ModelInput(one, np.ones((1, position + 1), np.int64), position * one), cache)
        return time.perf_counter() - start

    return run


def _unmeasured(fusion: Fusion, reason: str) -> Measure:
    return Measure(
        name=_name(fusion), dimension=Dimension.SPEED, unit="ratio", value=None, origin=Origin.NOT_MEASURED, reason=reason
    )


def _name(fusion: Fusion) -> str:
    return f"{fusion.name}_gain"
