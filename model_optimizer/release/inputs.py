"""What packaging reads: the results of the six stages before it, by key."""

from pathlib import Path

from pydantic import Field

from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.base import Frozen, Produced, StageInputs, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.front import ParetoFront
from model_optimizer.artifacts.memory import MemoryPlan
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.report import StageResults
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.artifacts.verification import Verification
from model_optimizer.release.config import ReleaseConfig
from model_optimizer.spec import Sla, Traffic


class TargetLoader(Frozen):
    """The framework that the profile names as target; its version as found is identity, where its interpreter lies is not."""

    framework: str
    """e.g. `vllm==0.24.0`, as stated."""
    found: str | None
    """e.g. `vllm 0.24.0`; None where no interpreter was named."""
    device: str
    doubts: tuple[str, ...] = ()
    """What the support matrix calls untried."""
    python: Path | None = Field(default=None, exclude=True)
    timeout_s: float = Field(default=900, exclude=True)


class PackageInputs(StageInputs):
    """Identity of a release. Where the signing key lies is no part of it."""

    name: str
    model_ref: str
    model: Tree
    """The source checkpoint, a Hugging Face directory."""
    source_bytes: int
    """Size of the weight file as it came."""
    target: Stored[TargetProfile]
    front: Stored[ParetoFront]
    quantized: Stored[QuantizedModel]
    engine: Stored[CompiledModel]
    baseline_engine: Stored[CompiledModel]
    memory: Stored[MemoryPlan]
    verification: Stored[Verification]
    attempts: tuple[Attempt, ...]
    """Every candidate that was tried, in order; the last one is released."""
    golden: tuple[Tree, ...]
    calibration_digest: str
    source_commit: str = Field(exclude=True)
    """For the provenance; a commit that changes nothing that is read here makes no new release."""
    authors: tuple[str, ...] = Field(default=(), exclude=True)
    """Names, e-mail addresses and logins of who made the source commit and of who started the run."""
    sla: Sla
    traffic: Traffic
    seeds: dict[str, int]
    required_soak_s: float
    """A shorter soak is signed off as provisional only."""
    config: ReleaseConfig = Field(exclude=True)
    loader: TargetLoader | None = None

    @property
    def results(self) -> StageResults:
        """Return the artifacts of the six stages, for the verdict over all of them."""
        return StageResults(
            target=self.target.artifact,
            front=self.front.artifact,
            quantized=self.quantized.artifact,
            compiled=self.engine.artifact,
            memory=self.memory.artifact,
            verification=self.verification.artifact,
        )

    @property
    def stage_keys(self) -> dict[str, str]:
        """Return the store key of every stage that the release rests on."""
        return {
            "profile": self.target.key,
            "scan": self.front.key,
            "quantize": self.quantized.key,
            "compile": self.engine.key,
            "compile baseline": self.baseline_engine.key,
            "memory": self.memory.key,
            "verify": self.verification.key,
        }

    @property
    def made(self) -> dict[str, Produced]:
        """Return when every stage that the release rests on was made, and how long that took."""
        return {
            "profile": self.target.produced,
            "scan": self.front.produced,
            "quantize": self.quantized.produced,
            "compile": self.engine.produced,
            "compile baseline": self.baseline_engine.produced,
            "memory": self.memory.produced,
            "verify": self.verification.produced,
        }
