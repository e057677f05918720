"""What a compile target is, and every one by name; one file of `targets/` each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.registry import Registry
from model_optimizer.spec import Sla, Traffic
from model_optimizer.store import Store

ROUNDED_ACCURACY_LEVEL = 4
"""The level at which MatMulNBits rounds activations to int8."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What to build: a source model, the checkpoint made of it, and how."""

    model: Tree
    checkpoint: Path
    """Equal to `model.path` where nothing was quantized."""
    recipe: WeightRecipe
    config: CompileConfig
    fingerprint: str
    store: Store
    sla: Sla = Sla()
    traffic: Traffic = Traffic()
    """With `sla` what shapes to expect; read by targets whose engines are tuned for shapes."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to build, tried in order until parity holds."""

    name: str
    accuracy_level: int = 0
    block_size: int = 64
    because: str = ""

    @property
    def rounds(self) -> bool:
        """Say whether products are made of int8 activations."""
        return self.accuracy_level == ROUNDED_ACCURACY_LEVEL


@dataclass(frozen=True, slots=True)
class Built:
    """An engine in the workspace; `reproduce` is None where nothing was compiled."""

    engine: Engine
    layout: str
    reproduce: str | None
    integer_layers: tuple[str, ...] | None = None
    """Layers that the engine was seen to compute from their codes; None: the target does not look."""
    variant: Variant | None = None
    """How it was really built, where that is not what was asked for."""


class CompileTarget(Protocol):
    """How engines for one runtime are made."""

    def levels(self, recipe: WeightRecipe) -> tuple[int, ...]:
        """Return the levels that differ for a recipe, lowest first; `request.config.level` of a build is one of them."""

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        """Return the ways to build a recipe, preferred first."""

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        """Write engine, layout.json and reproduce.py to the workspace, over what lies there.

        Raises:
            CompileError: the build failed; carries the reproduce script.
        """


TARGETS: Registry[CompileTarget] = Registry("compile target", "model_optimizer.compilation.targets")
