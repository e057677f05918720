"""Tiny checkpoints with what transforms are for: outlying channels, gains that differ, biases."""

import json
from pathlib import Path

import torch
from architecture_fixtures import write_architecture
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from model_optimizer.artifacts.base import Stored, Tree
from model_optimizer.artifacts.moments import Moments
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig
from model_optimizer.quantization.layers import read_layers
from model_optimizer.quantization.moments import MomentsInputs, measure_moments
from model_optimizer.quantization.transforms.base import TransformInputs
from model_optimizer.store import Store, stage_key

FORMAT = "int4-g32"
OUTLIERS = (3, 17, 40)
SETTINGS = QuantizationConfig.model_validate({"moments_sequences": 6, "moments_tokens": 32, "rotation_seeds": 3})


def write_outlying(config: PreTrainedConfig, directory: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random checkpoint: three columns of every projection are eight times as large, gains lie in 0.2 to 2.2."""
    write_architecture(config, directory)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(directory / "model.safetensors")
    for name in sorted(tensors):
        tensor = tensors[name]
        if "norm" in name:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 2 + 0.2)
        elif name.endswith("bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 10)
        elif "_proj" in name:
            tensor[:, list(OUTLIERS)] *= 8
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    return directory


def write_text(folder: Path) -> CalibrationSource:
    path = folder / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"Flock {n} has {n * n} sheep on {n % 7} hills."}) for n in range(12)))
    return CalibrationSource.of(CalibrationConfig(path=path), folder)


def moments_in(store: Store, calibration: CalibrationSource, model: Tree) -> Stored[Moments]:
    wanted = MomentsInputs(fingerprint="t", model=model, calibration=calibration, num_sequences=6, max_tokens=32)
    return store.produce(
        "moments", stage_key(wanted), Moments, lambda workspace: measure_moments(wanted, workspace, progress=Quiet())
    )


def transform_inputs(model: Path, calibration: CalibrationSource, settings: QuantizationConfig = SETTINGS) -> TransformInputs:
    plan = {layer.name: FORMAT for layer in read_layers(model).linears}
    return TransformInputs.of("t", Tree.of(model), calibration, plan, settings)


@torch.no_grad()
def logits(directory: Path) -> torch.Tensor:
    """Return what transformers computes, [T, V]."""
    logits_1TV: torch.Tensor = load_dequantized(directory)(torch.arange(4, 68)[None]).logits
    return logits_1TV[0]
