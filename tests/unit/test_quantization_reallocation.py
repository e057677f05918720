"""The second look at a mix: slopes against plain autograd, changes that keep the bytes and lower KL, and after a kill."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.quantized import LayerSensitivity, Sensitivity
from model_optimizer.artifacts.reallocation import MixSlopes
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization.allocation import Allocation
from model_optimizer.quantization.breaker import GroupRule
from model_optimizer.quantization.calibration import CalibrationSource, prepare
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.quantization.layers import read_layers, tie_groups
from model_optimizer.quantization.logits_kl import kl_nats
from model_optimizer.quantization.reallocation import LABEL, STATE, SlopesInputs, measure_slopes, reallocate
from model_optimizer.quantization.sensitivity import BATCH_TOKENS, SensitivityInputs, measure_sensitivity

FORMAT_NAMES = ("int2-g32", "int3-g64", "int4-g64", "int8-channel")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSource:
    directory, source = tmp_path_factory.mktemp("calibration"), np.random.default_rng(11)
    words = ["wool", "lamb", "ewe", "fold", "hill", "dawn", "bell", "rain", "grass", "gate", "stone", "river"]
    lines = [json.dumps({"text": " ".join(source.choice(words, 20))}) for _ in range(40)]
    (directory / "c.jsonl").write_text("\n".join(lines))
    return CalibrationSource.of(CalibrationConfig(path=directory / "c.jsonl", num_samples=64), directory)


@pytest.fixture(scope="module")
def rules(tiny_llama: Path) -> tuple[GroupRule, ...]:
    return tuple(GroupRule(group, FORMAT_NAMES, "recipe") for group in tie_groups(read_layers(tiny_llama).linears))


@pytest.fixture(scope="module")
def sensitivity(tiny_llama: Path, calibration: CalibrationSource, tmp_path_factory: pytest.TempPathFactory) -> Sensitivity:
    inputs = SensitivityInputs(
        fingerprint="test",
        model=Tree.of(tiny_llama),
        calibration=calibration,
        formats=FORMAT_NAMES,
        num_sequences=24,
        max_tokens=64,
        seed=3,
    )
    return measure_sensitivity(inputs, tmp_path_factory.mktemp("sensitivity"), progress=Quiet())


@pytest.fixture(scope="module")
def first(rules: tuple[GroupRule, ...], sensitivity: Sensitivity) -> Allocation:
    """A mix that no allocation would choose: 2 and 8 bits in turn."""
    by_layer = {layer.layer: layer for layer in sensitivity.layers}
    options = [rule.option(("int2-g32", "int8-channel")[number % 2], by_layer) for number, rule in enumerate(rules)]
    return Allocation(
        tuple(it.format for it in options), sum(it.num_bytes for it in options), sum(it.damage_nats for it in options)
    )


def plan_of(rules: tuple[GroupRule, ...], allocation: Allocation) -> dict[str, str]:
    return {layer.name: name for rule, name in zip(rules, allocation.formats, strict=True) for layer in rule.layers}


@pytest.fixture(scope="module")
def inputs(tiny_llama: Path, calibration: CalibrationSource, rules: tuple[GroupRule, ...], first: Allocation) -> SlopesInputs:
    plan = plan_of(rules, first)
    return SlopesInputs(
        fingerprint="test",
        model=Tree.of(tiny_llama),
        calibration=calibration,
        plan=plan,
        formats=dict.fromkeys(plan, FORMAT_NAMES),
        num_sequences=12,
        max_tokens=64,
    )


@pytest.fixture(scope="module")
def slopes(inputs: SlopesInputs, tmp_path_factory: pytest.TempPathFactory) -> MixSlopes:
    return measure_slopes(inputs, tmp_path_factory.mktemp("slopes"), progress=Quiet())


def sequences_of(inputs: SlopesInputs) -> list[torch.Tensor]:
    samples = prepare(inputs.calibration, inputs.model.path).samples[: inputs.num_sequences]
    return [torch.tensor([tokens[: inputs.max_tokens]]) for tokens in samples]


def mean_kl(model_path: Path, plan: dict[str, str], sequences: list[torch.Tensor]) -> float:
    """Return KL(original || plan) per token, by loading both."""
    original, mixed = load_dequantized(model_path), load_dequantized(model_path)
    with torch.no_grad():
        for layer, name in plan.items():
            weight_OI = mixed.get_parameter(f"{layer}.weight")
            weight_OI.copy_(FORMATS.get(name).round_trip(weight_OI))
        found = [kl_nats(original(tokens_1T).logits[0], mixed(tokens_1T).logits[0]) for tokens_1T in sequences]
    return float(torch.cat(found).mean())


def test_slopes_equal_those_of_plain_autograd(inputs: SlopesInputs, slopes: MixSlopes) -> None:
    name = "model.layers.1.mlp.down_proj"
    original, mixed = load_dequantized(inputs.model.path), load_dequantized(inputs.model.path)
    with torch.no_grad():
        for layer, it in inputs.plan.items():
            weight_OI = mixed.get_parameter(f"{layer}.weight")
            weight_OI.copy_(FORMATS.get(it).round_trip(weight_OI))
    weight_OI, sequences = mixed.get_parameter(f"{name}.weight"), sequences_of(inputs)
    total = torch.zeros(())
    for tokens_1T in sequences:
        with torch.no_grad():
            log_probs_TV = torch.log_softmax(original(tokens_1T).logits[0], -1)
        total = total + torch.nn.functional.kl_div(
            torch.log_softmax(mixed(tokens_1T).logits[0], -1), log_probs_TV, log_target=True, reduction="sum"
        )
    gradient_OI = torch.autograd.grad(total, weight_OI)[0]
    num_tokens = sum(tokens_1T.numel() for tokens_1T in sequences)
    assert slopes.num_tokens == num_tokens
    assert slopes.kl_nats == pytest.approx(float(total.detach()) / num_tokens, rel=1e-4)
    assert slopes.kl_nats == pytest.approx(mean_kl(inputs.model.path, inputs.plan, sequences), rel=1e-4)
    source_OI = original.get_parameter(f"{name}.weight").detach()
    for it in FORMAT_NAMES:
        change_OI = FORMATS.get(it).round_trip(source_OI) - weight_OI.detach()
        expected = float((gradient_OI * change_OI).sum()) / num_tokens
        assert slopes.slope_nats[name][it] == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert slopes.slope_nats[name][inputs.plan[name]] == 0.0


def value_of(model: PreTrainedModel, layer: LayerSensitivity, name: str, now: str, slope_nats: float) -> float:
    """Return what one layer's change is worth, written out."""
    if name == now:
        return 0.0
    weight_OI = model.get_parameter(f"{layer.layer}.weight").detach()
    there_OI, here_OI = (FORMATS.get(it).round_trip(weight_OI) - weight_OI for it in (name, now))
    apart = float((there_OI - here_OI).square().sum() / (there_OI.square().sum() + here_OI.square().sum()))
    return 0.5 * slope_nats + apart * (layer.predicted_kl_nats[name] + layer.predicted_kl_nats[now])


def test_reallocate_finds_the_best_set_of_changes_within_the_bytes(
    inputs: SlopesInputs, slopes: MixSlopes, rules: tuple[GroupRule, ...], first: Allocation, sensitivity: Sensitivity
) -> None:
    source, by_layer = np.random.default_rng(2), {layer.layer: layer for layer in sensitivity.layers}
    drawn = {layer: {name: float(source.normal(0, 2)) for name in FORMAT_NAMES} for layer in slopes.slope_nats}
    model = load_dequantized(inputs.model.path)
    second, decision = reallocate(
        rules,
        first,
        slopes.model_copy(update={"slope_nats": drawn}),
        by_layer,
        lambda name: model.get_parameter(f"{name}.weight").detach(),
    )
    values, num_bytes = np.zeros(1), np.zeros(1)  # of every one of the 4^8 assignments
    for rule, now in zip(rules, first.formats, strict=True):
        worth = [
            sum(value_of(model, by_layer[it.name], name, now, drawn[it.name][name]) for it in rule.layers)
            for name in FORMAT_NAMES
        ]
        values = np.add.outer(worth, values).ravel()
        num_bytes = np.add.outer([rule.option(name, by_layer).num_bytes for name in FORMAT_NAMES], num_bytes).ravel()
    best = values[num_bytes <= first.num_bytes].min()
    assert second.num_bytes <= first.num_bytes
    assert (
        second.damage_nats == pytest.approx(best, rel=1e-4) == pytest.approx(decision.numbers["expected_change_nats"], rel=1e-4)
    )
    changed = {key for key, name in plan_of(rules, second).items() if inputs.plan[key] != name}
    assert len(changed) == decision.numbers["num_layers"] > 0


def test_reallocate_stays_where_no_change_is_worth_it(
    slopes: MixSlopes, rules: tuple[GroupRule, ...], first: Allocation, sensitivity: Sensitivity, inputs: SlopesInputs
) -> None:
    flat = slopes.model_copy(update={"slope_nats": {layer: dict.fromkeys(FORMAT_NAMES, 0.0) for layer in slopes.slope_nats}})
    by_layer = {layer.layer: layer for layer in sensitivity.layers}
    model = load_dequantized(inputs.model.path)
    second, decision = reallocate(rules, first, flat, by_layer, lambda name: model.get_parameter(f"{name}.weight").detach())
    assert second.formats == first.formats
    assert second.damage_nats == 0.0 == decision.numbers["num_layers"]


class Killed(BaseException):
    pass


class KillAfter(Quiet):
    """Dies in front of item `count`."""

    def __init__(self, count: int):
        self._count = count
        self.seen = 0

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for item in items:
            if label == LABEL:
                if self.seen == self._count:
                    raise Killed
                self.seen += 1
            yield item


def test_measure_slopes_continues_after_a_kill_with_the_same_numbers(
    inputs: SlopesInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 100)
    whole = measure_slopes(inputs, tmp_path, progress=Quiet())
    with pytest.raises(Killed):
        measure_slopes(inputs, tmp_path, progress=KillAfter(3))
    assert len((tmp_path / STATE).read_text().splitlines()) == 1 + 3
    rest = KillAfter(1000)
    assert measure_slopes(inputs, tmp_path, progress=rest) == whole
    assert 0 < rest.seen < 12
    assert not (tmp_path / STATE).exists()
