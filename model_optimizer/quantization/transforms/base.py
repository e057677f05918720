"""What a foldable transform is: edits of stored tensors after which the model computes the same and rounds better.

A transform only says what becomes of which tensor; `fold.py` writes the result shard by shard and proves that the logits
stayed. It knows anatomy (who reads whose channels) and input moments, never the checkpoint that is made in the end.

Shape letters: O output features, I input features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

import torch

from model_optimizer.artifacts.base import StageInputs, Tree
from model_optimizer.decisions import Decision
from model_optimizer.formats.registry import FORMATS
from model_optimizer.protocols import Progress
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.config import QuantizationConfig
from model_optimizer.quantization.transforms.anatomy import Anatomy

Edit = Callable[[torch.Tensor], torch.Tensor]
"""A tensor as float32 in, the same shape out."""


class TransformInputs(StageInputs):
    """Everything that a transform reads."""

    model: Tree
    calibration: CalibrationSource
    transform: str = ""
    """A name of the registry."""
    plan: dict[str, str]
    """Layer -> format name that its weight is to be rounded to."""
    num_sequences: int
    max_tokens: int
    num_seeds: int
    """How many random rotations are tried."""
    smoothing: float
    """Share of the outliers that SmoothQuant moves from activations to weights, 0 to 1."""
    seed: int

    @classmethod
    def of(
        cls, fingerprint: str, model: Tree, calibration: CalibrationSource, plan: dict[str, str], config: QuantizationConfig
    ) -> Self:
        """Return what a profile says about transforms; which of them is still open."""
        return cls(
            fingerprint=fingerprint,
            model=model,
            calibration=calibration,
            plan=plan,
            num_sequences=config.moments_sequences,
            max_tokens=config.moments_tokens,
            num_seeds=config.rotation_seeds,
            smoothing=config.smoothing_ratio,
            seed=config.seed,
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What a transform works on."""

    inputs: TransformInputs
    anatomy: Anatomy
    workspace: Path
    """Where it may journal; what it leaves there outlives a kill."""
    moment: Callable[[str], torch.Tensor]
    """Layer -> second moment [I, I] of its input in this model; the walk over the text runs when it is first asked for."""
    weight: Callable[[str], torch.Tensor]
    """Tensor name -> its values as float32."""
    progress: Progress


@dataclass(slots=True)
class Folding:
    """What becomes of each tensor; edits of one tensor apply in the order in which they were added."""

    edits: dict[str, list[Edit]] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    """New tensor -> the stored one that it is a copy of, before its own edits."""
    untied: bool = False
    """The head no longer is the embedding."""
    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """`{added_mb}` stands for the megabytes that the checkpoint grew by."""

    def add(self, name: str, edit: Edit) -> None:
        """Append an edit of tensor `name`."""
        self.edits.setdefault(name, []).append(edit)

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what becomes of tensor `name`, float32."""
        edited = tensor.float()
        for edit in self.edits.get(name, ()):
            edited = edit(edited)
        return edited


class Transform(Protocol):
    """Choose edits that leave the function as it is."""

    def fold(self, job: Job) -> Folding:
        """Return the edits.

        Law: the model with all of them applied has the logits of the model without, to float32 rounding.

        Raises:
            UnsupportedError: the architecture has no place for the fold; it is named.
        """


def scale_columns(factor_I: torch.Tensor) -> Edit:
    """Return the edit W diag(factor)."""
    return lambda weight_OI: weight_OI * factor_I


def divide_rows(divisor_O: torch.Tensor, start: int = 0) -> Edit:
    """Return the edit that divides rows `start` and following of a matrix, or elements of a bias, by `divisor_O`."""

    def divide(tensor: torch.Tensor) -> torch.Tensor:
        divided = tensor.clone()
        rows = divided[start : start + len(divisor_O)]
        rows.div_(divisor_O.reshape(-1, *[1] * (tensor.ndim - 1)))
        return divided

    return divide


def rounded_formats(job: Job, layers: tuple[str, ...]) -> Mapping[str, str]:
    """Return layer -> format of those that will be rounded."""
    plan = job.inputs.plan
    return {layer: plan[layer] for layer in layers if layer in plan and FORMATS.get(plan[layer]).on_grid}
