"""Quantization along the walk against blocks run by hand, and after a kill."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.protocols import Quiet, T
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.quantization.layers import read_layers
from model_optimizer.quantization.parts import Parts
from model_optimizer.quantization.propagation import STATE, Propagation, quantize_along
from model_optimizer.quantization.registry import METHODS
from model_optimizer.quantization.walk import Walk, plan_walk

FORMAT = "int3-g32"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=3)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> CalibrationSource:
    path = tmp_path_factory.mktemp("calibration") / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills. " * 2}) for n in range(16)))
    return CalibrationSource.of(CalibrationConfig(path=path), path.parent)


def walk_over(model: Path, calibration: CalibrationSource) -> Walk:
    return plan_walk(model, calibration, num_sequences=8, max_tokens=48)


def run_along(walk: Walk, folder: Path, *, progress: Quiet | None = None) -> Parts:
    parts = Parts(folder / "parts")
    plan = {layer.name: FORMAT for group in walk.groups for layer in group}
    run = Propagation(walk, plan, METHODS.get("gptq"), parts)
    quantize_along(run, folder, progress or Quiet())
    return parts


@torch.no_grad()
def output_moment(model: Path, walk: Walk, parts: Parts, layer: str) -> torch.Tensor:
    """Return the moment of a layer's input once all layers of the blocks before its own are rounded, from the whole model."""
    whole = load_dequantized(model)
    for name, block in walk.stack.numbers.items():
        if block < walk.stack.numbers[layer]:
            tensor = parts.read(name, FORMAT)
            assert tensor is not None
            whole.get_parameter(f"{name}.weight").copy_(FORMATS.get(FORMAT).dequantize(tensor))
    found: list[torch.Tensor] = []
    whole.get_submodule(layer).register_forward_pre_hook(lambda _, arguments: found.append(arguments[0].flatten(0, -2)))
    for tokens in walk.sequences:
        whole(torch.tensor([tokens]), use_cache=False)
    inputs_NI = torch.cat(found)
    return inputs_NI.T @ inputs_NI / len(inputs_NI)


def test_quantize_along_measures_each_block_on_the_rounded_ones_before_it(
    model: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    walk = walk_over(model, calibration)
    parts = run_along(walk, tmp_path)
    weights = load_dequantized(model)
    for layer in ("model.layers.0.self_attn.o_proj", "model.layers.2.mlp.down_proj"):
        moment_II = output_moment(model, walk, parts, layer)
        expected = METHODS.get("gptq").quantize(weights.get_parameter(f"{layer}.weight").data, FORMATS.get(FORMAT), moment_II)
        found = parts.read(layer, FORMAT)
        assert found is not None
        assert (found.codes_OI != expected.codes_OI).float().mean().item() < 0.02  # sums in another order break ties
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts"]


class Killed(BaseException):
    """Stands for SIGKILL."""


class KillAt(Quiet):
    """Stop the world before block `count` of this call."""

    def __init__(self, count: int):
        self.count = count

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for index, item in enumerate(items):
            if index == self.count:
                raise Killed
            yield item


@pytest.mark.parametrize("damage", ["none", "torn state", "lost layer"])
def test_quantize_along_continues_after_a_kill_with_the_same_bytes(
    damage: str, model: Path, calibration: CalibrationSource, tmp_path: Path
) -> None:
    walk = walk_over(model, calibration)
    whole = run_along(walk, tmp_path / "whole")
    with pytest.raises(Killed):
        run_along(walk, tmp_path / "cut", progress=KillAt(2))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut" / "parts").iterdir()}
    assert (tmp_path / "cut" / STATE).is_file() and len(kept) == 14
    if damage == "torn state":
        state = tmp_path / "cut" / "prefix-0.bin"
        state.write_bytes(state.read_bytes()[:-4])
    if damage == "lost layer":
        min(kept).unlink()
    cut = run_along(walk, tmp_path / "cut")
    names = sorted(path.name for path in whole.directory.iterdir())
    assert names == sorted(path.name for path in cut.directory.iterdir()) and len(names) == 21
    assert all((whole.directory / name).read_bytes() == (cut.directory / name).read_bytes() for name in names)
    again = [path for path, time_ns in kept.items() if path.stat().st_mtime_ns != time_ns]
    assert again == ([min(kept)] if damage == "lost layer" else [])


def test_quantize_along_refuses_a_layer_outside_the_stack(model: Path, calibration: CalibrationSource, tmp_path: Path) -> None:
    run = Propagation(walk_over(model, calibration), {"vision.head": FORMAT}, METHODS.get("gptq"), Parts(tmp_path / "parts"))
    with pytest.raises(UnsupportedError, match=r"vision\.head lies outside the stack"):
        quantize_along(run, tmp_path, Quiet())


def test_walk_tells_what_it_holds(model: Path, calibration: CalibrationSource) -> None:
    walk = walk_over(model, calibration)
    assert walk.stack.num_blocks == 3 and len(read_layers(model).linears) == len(walk.stack.numbers) == 21
    assert [layer.name.rsplit(".", 1)[1] for layer in walk.leaders(1)] == ["q_proj", "o_proj", "gate_proj", "down_proj"]
    assert walk.num_tokens == sum(map(len, walk.sequences)) and max(map(len, walk.sequences)) <= 48
