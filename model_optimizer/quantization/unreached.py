"""Layers that calibration never reached, above all experts that no token was sent to: rounded to nearest, and named.

Their second moment is zero, which says nothing about what they will see. They keep the format of their siblings.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from model_optimizer.artifacts.quantized import LayerSensitivity
from model_optimizer.formats.base import QuantizedTensor, WeightFormat
from model_optimizer.quantization.methods.base import Method
from model_optimizer.quantization.registry import METHODS
from model_optimizer.store import write_atomically

FALLBACK = "rtn"
REASON = "rounded to nearest: no calibration token reached it"
_EXPERT = re.compile(r"^(?P<block>.+\.experts)\.(?P<number>\d+)\.")
_SHOWN = 8


def is_unreached(moment_II: torch.Tensor) -> bool:
    """Return whether a layer never saw an input other than zero."""
    return not moment_II.diagonal().any()


def quantize_reached(
    method: Method, weight_OI: torch.Tensor, weight_format: WeightFormat, moment_II: torch.Tensor
) -> QuantizedTensor:
    """Quantize by the method, or round to nearest where the moment holds nothing."""
    if is_unreached(moment_II):
        return METHODS.get(FALLBACK).quantize(weight_OI, weight_format)
    return method.quantize(weight_OI, weight_format, moment_II)


def unreached_warnings(layers: Iterable[str]) -> tuple[str, ...]:
    """Return one warning per block of experts, and one for all other layers."""
    experts: dict[str, set[int]] = {}
    others: set[str] = set()
    for layer in layers:
        if match := _EXPERT.match(layer):
            experts.setdefault(match["block"], set()).add(int(match["number"]))
        else:
            others.add(layer)
    found = [
        f"{len(numbers)} of {block} were never reached by the calibration text and are rounded to nearest: "
        f"{_listed(map(str, sorted(numbers)))}; give more or other text"
        for block, numbers in sorted(experts.items())
    ]
    if others:
        found.append(
            f"{len(others)} layers saw nothing but zeros in calibration and are rounded to nearest: {_listed(sorted(others))}"
        )
    return tuple(found)


def unseen_warnings(layers: Iterable[LayerSensitivity]) -> tuple[str, ...]:
    """Return a warning where the sensitivity pass sent no token to some experts, so that their damage is unknown, not none."""
    unseen = [it.layer for it in layers if _EXPERT.match(it.layer) and not any(it.predicted_kl_nats.values())]
    if not unseen:
        return ()
    return (
        f"{len(unseen)} matrices of experts saw no token in the sensitivity pass; their predicted KL of 0 is no measurement, "
        "and they get the format that all experts get",
    )


def remember(path: Path, layers: Iterable[str]) -> None:
    """Add layers to a file that a killed walk finds again."""
    write_atomically(path, json.dumps(sorted({*recall(path), *layers})).encode())


def recall(path: Path) -> tuple[str, ...]:
    """Return what was remembered, sorted."""
    return tuple(json.loads(path.read_bytes())) if path.is_file() else ()


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")
