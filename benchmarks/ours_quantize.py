"""One quantization of ours in a process of its own, reported in the form that peers report in.

`full` = sensitivity, allocation over seven formats, GPTQ or what `--method` names; `uniform` = GPTQ in int4-g64 alone, which
needs a store where `sensitivity` ran before, because the stage asks for it. Every mode is the engine's own stage.
"""

import argparse
import os
import shutil
from pathlib import Path

import torch

from benchmarks.peers.job import RESULT, WEIGHTS, Spent, measured, write_report
from benchmarks.sensitivity_parts import FORMAT_NAMES
from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.code_version import code_version
from model_optimizer.formats.loading import read_state
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.shared import QuantizeInputs, shared_sensitivity
from model_optimizer.quantization.stage import quantize
from model_optimizer.store import Store
from model_optimizer.strategy.config import Method

MODES = ("full", "uniform", "sensitivity")
METHODS: tuple[Method, ...] = ("gptq", "signround")
TUNING_BATCH = {"cpu": 2, "cuda": 32}
"""Pieces of 256 tokens in each of 200 steps: about as long as AutoRound's 50 of 1024, or as many tokens as in its default 200
of 8192, which need a GPU."""
NO_BREAKER_NATS = 1e9
"""Peers keep no layer in full precision either."""


def source_of(calibration: Path, num_sequences: int, length: int) -> CalibrationSource:
    """Return the first `num_sequences` records, `length` tokens each."""
    config = CalibrationConfig(
        path=calibration, num_samples=num_sequences, min_length=length, max_length=length, held_out_ratio=0.01
    )
    return CalibrationSource.of(config, calibration.parent)


def inputs_of(model: Path, source: CalibrationSource, recipe: WeightRecipe) -> QuantizeInputs:
    config = QuantizationConfig(
        kl_breaker_nats=NO_BREAKER_NATS,
        sensitivity_sequences=64,
        sensitivity_tokens=256,
        moments_sequences=source.num_samples,
        moments_tokens=source.max_length,
        tuning_batch=TUNING_BATCH["cuda" if torch.cuda.is_available() else "cpu"],
    )
    return QuantizeInputs(
        fingerprint=code_version("quantization"), model=Tree.of(model), recipe=recipe, calibration=source, config=config
    )


def recipe_of(mode: str, bits: float, method: Method = "gptq") -> WeightRecipe:
    if mode == "full":
        return WeightRecipe(method=method, formats=FORMAT_NAMES, bits_budget=bits)
    return WeightRecipe(method="gptq", formats=("int4-g64",))


def write(model: QuantizedModel, entry: Path, spent: Spent, output: Path) -> None:
    """Write the dequantized weights of the planned layers, and the report."""
    from safetensors.torch import save_file

    state = read_state(entry / (model.checkpoint or ""))
    save_file({layer.layer: state[f"{layer.layer}.weight"].contiguous() for layer in model.plan}, output / WEIGHTS)
    formats = {layer.layer: layer.format for layer in model.plan}
    settings: dict[str, str | float] = {"method": model.recipe.label, "predicted_kl_nats": model.predicted_kl_nats}
    write_report(output, model.coverage.true_bits_per_weight, formats, spent, settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "calibration", "store", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--bits", type=float, default=4.25)
    parser.add_argument("--mode", choices=MODES, default="full")
    parser.add_argument("--method", choices=METHODS, default="gptq")
    parser.add_argument("--num-sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    asked = parser.parse_args()
    source = source_of(asked.calibration.absolute(), asked.num_sequences, asked.length)
    inputs, store = (
        inputs_of(asked.model.absolute(), source, recipe_of(asked.mode, asked.bits, asked.method)),
        Store(asked.store.absolute()),
    )
    asked.output.mkdir(parents=True, exist_ok=True)
    (asked.output / RESULT).unlink(missing_ok=True)
    if asked.mode == "sensitivity":
        shared_sensitivity(inputs, store, progress=Quiet())
        return
    entry = asked.output.absolute() / "entry"
    shutil.rmtree(entry, ignore_errors=True)  # a finished part of another code version must not be taken up again
    entry.mkdir()
    with measured() as spent:
        model = quantize(inputs, entry, store=store, progress=Quiet())
    write(model, entry, spent, asked.output)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
