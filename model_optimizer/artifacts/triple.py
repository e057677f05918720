"""The three frameworks that a model meets, each with its version, and who has loaded it."""

from pydantic import Field

from model_optimizer.artifacts.base import Frozen


class Component(Frozen):
    """One framework; the version is `not stated` where its files do not tell."""

    name: str
    version: str

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"


class LoadCheck(Frozen):
    """A load canary: a framework in its own interpreter continued prompts, and the checkpoint judged its tokens."""

    framework: str
    version: str
    num_tokens: int
    agreement_ratio: float
    """Tokens that the checkpoint itself would have chosen, over all."""
    regret_ratio: float
    """How far tokens lie below the checkpoint's own choice, on average: 0 = they are it, 1 = as if drawn blindly."""
    load_s: float = Field(default=0.0, exclude=True)
    """Not kept: files that hold this are the same after a rerun."""


class Triple(Frozen):
    """Train framework, optimizer, inference framework; `checked` are the load canaries that passed."""

    training: Component
    optimizer: Component
    inference: Component
    checked: tuple[LoadCheck, ...] = ()
    unchecked_because: str | None = None
    """Why no canary ran; None where one did."""
