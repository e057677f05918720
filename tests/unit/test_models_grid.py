"""Recognising weights that already lie on a quantization grid, and not seeing one in ordinary weights."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from model_optimizer.models.grid import detect_grid, find_grid

FLOAT32, BFLOAT16 = 2.0**-24, 2.0**-8


def weights(seed: int = 0, shape: tuple[int, int] = (32, 256)) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(0, 0.05, shape)


def on_grid(weight_OI: NDArray[np.float64], bits: int, group: int | None, symmetric: bool) -> NDArray[np.float64]:
    """Round to a grid per group and back, in float32 as a dequantizer does."""
    rows = weight_OI.shape[0]
    groups = weight_OI.reshape(-1, group or weight_OI.shape[1])
    if symmetric:
        top = 2 ** (bits - 1) - 1
        scale = np.float32(np.abs(groups).max(axis=1, keepdims=True) / top)
        values = np.rint(groups / scale).astype(np.float32) * scale
    else:
        low = np.float32(groups.min(axis=1, keepdims=True))
        scale = np.float32((groups.max(axis=1, keepdims=True) - low) / (2**bits - 1))
        values = np.rint((groups - low) / scale).astype(np.float32) * scale + low
    return values.astype(np.float64).reshape(rows, -1)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_find_grid_names_bits_group_and_symmetry(bits: int, group: int, symmetric: bool) -> None:
    kind = "symmetric" if symmetric else "asymmetric"
    assert str(find_grid(on_grid(weights(), bits, group, symmetric), FLOAT32)) == f"{bits}-bit group {group} {kind}"


def test_find_grid_names_a_channel_grid() -> None:
    assert str(find_grid(on_grid(weights(), 8, None, True), FLOAT32)) == "8-bit per channel symmetric"


@pytest.mark.parametrize("seed", range(20))
def test_find_grid_sees_none_in_random_weights(seed: int) -> None:
    assert find_grid(weights(seed), FLOAT32) is None


@pytest.mark.parametrize("seed", range(20))
def test_find_grid_sees_none_in_random_bfloat16_weights(seed: int) -> None:
    rounded = torch.from_numpy(weights(seed)).bfloat16().double().numpy()
    assert find_grid(rounded, BFLOAT16) is None


def test_find_grid_sees_4_bits_through_bfloat16_rounding() -> None:
    rounded = torch.from_numpy(on_grid(weights(), 4, 32, True)).bfloat16().double().numpy()
    assert str(find_grid(rounded, BFLOAT16)) == "4-bit group 32 symmetric"


def test_find_grid_sees_none_when_one_group_in_many_is_off() -> None:
    weight_OI = on_grid(weights(), 4, 32, False)
    weight_OI[3, 5] += 0.0004
    assert find_grid(weight_OI, FLOAT32) is None


def test_find_grid_sees_none_in_constant_weights() -> None:
    assert find_grid(np.zeros((4, 64)), FLOAT32) is None


def _with_linears_on_grid(source: Path, directory: Path, share: int) -> Path:
    """Copy a model with the linears of every `share`-th name on a 4-bit group-32 asymmetric grid."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    names = sorted(name for name in tensors if "proj" in name)
    for name in names[::share]:
        tensors[name] = torch.from_numpy(on_grid(tensors[name].double().numpy(), 4, 32, False)).float()
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_detect_grid_finds_the_grid_of_a_model(tiny_llama: Path, tmp_path: Path) -> None:
    assert detect_grid(_with_linears_on_grid(tiny_llama, tmp_path / "m", 1)) == "4-bit group 32 asymmetric"


def test_detect_grid_says_none_when_few_layers_lie_on_it(tiny_llama: Path, tmp_path: Path) -> None:
    assert detect_grid(_with_linears_on_grid(tiny_llama, tmp_path / "m", 5)) is None


def test_detect_grid_says_none_for_an_ordinary_model(tiny_llama: Path) -> None:
    assert detect_grid(tiny_llama) is None
