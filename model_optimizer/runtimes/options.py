"""What may be said to a runtime beside engine and KV plan. Free of frameworks, so that a server reads it from serve.yaml."""

from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from model_optimizer.protocols import RuntimeFactory
from model_optimizer.registry import Registry
from model_optimizer.runtimes.native_options import NativeOptions
from model_optimizer.spec import Spec


class ManagedOptions(Spec):
    """A server in an interpreter of its own: where it is, and what is said to it beside what the bundle tells."""

    command: Path | None = Field(default=None, description="the program; left out: looked for in PATH")
    arguments: tuple[str, ...] = Field(default=(), description="said after the generated ones, so that they win")
    environment: dict[str, str] = Field(default={}, description="variables of its own beside this process's")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="of weights and activations; auto: as the checkpoint says"
    )
    utilization_ratio: float | None = Field(
        default=None, gt=0, le=0.95, description="of a GPU's memory, weights included; left out: the cache gets the plan's bytes"
    )
    log: Path | None = Field(default=None, description="file that its output is added to; left out: kept for its last words only")
    start_timeout_s: float = Field(default=900, gt=0, description="until it answers; engine.start_timeout_s holds beside it")


class RuntimeOptions(Spec):
    """Sections that are stated for one kind of runtime each."""

    native: NativeOptions | None = None
    managed: ManagedOptions | None = None

    @property
    def stated(self) -> tuple[str, ...]:
        """Return the names of the sections that are there."""
        sections = {"native": self.native, "managed": self.managed}
        return tuple(name for name, section in sections.items() if section is not None)


class TunableFactory(Protocol):
    """A runtime that takes options."""

    @property
    def section(self) -> str:
        """Return the one section of `RuntimeOptions` that it reads."""

    def tuned(self, options: RuntimeOptions) -> RuntimeFactory:
        """Return the factory that opens engines as the options say."""


TUNABLES: Registry[TunableFactory] = Registry("runtime with options", "model_optimizer.runtimes.backends")
