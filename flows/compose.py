"""What each stage reads: the inputs of the seven stages, built from a request and the stages before.

The one place where a stage's result becomes another stage's input; the flow and `plan` both use it.
"""

from dataclasses import dataclass
from functools import cached_property

from flows.bootstrap import home
from flows.prepare import Request
from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.base import Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.front import ParetoFront
from model_optimizer.artifacts.memory import MemoryPlan
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.compilation.stage import CompileInputs
from model_optimizer.hardware.fingerprint import fingerprint
from model_optimizer.memory.stage import MemoryInputs
from model_optimizer.models.resolve import ResolvedModel
from model_optimizer.profiling.stage import ProfileInputs
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.calibration_source import Sampler
from model_optimizer.quantization.shared import QuantizeInputs
from model_optimizer.release.inputs import PackageInputs, TargetLoader
from model_optimizer.strategy.entries import Ingredients, compile_inputs, quantize_inputs
from model_optimizer.strategy.scan import ScanInputs
from model_optimizer.verification.stage import VerifyInputs


@dataclass(frozen=True)
class Tested:
    """A candidate with all that was made of it, and the baseline's engine that it was held against."""

    attempt: Attempt
    engine: Stored[CompiledModel]
    baseline: Stored[CompiledModel]
    memory: Stored[MemoryPlan]


@dataclass(frozen=True)
class SixStages:
    """The stored results that the release rests on; the last candidate that was tested is released."""

    target: Stored[TargetProfile]
    front: Stored[ParetoFront]
    tested: tuple[Tested, ...]


@dataclass(frozen=True)
class Composer:
    """Builds every stage's inputs for one request on this machine."""

    request: Request
    model: ResolvedModel
    source_commit: str

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint()

    @cached_property
    def calibration(self) -> CalibrationSource:
        sampler = Sampler(model=self.model.tree, cache=home() / "calibration")
        return CalibrationSource.of(self.request.profile.calibration, self.request.base, sampler)

    @cached_property
    def golden(self) -> tuple[Tree, ...]:
        return tuple(Tree.of(folder) for folder in self.request.golden_sets)

    @cached_property
    def _shared(self) -> Ingredients:
        profile = self.request.profile
        return Ingredients(self.fingerprint, self.model.tree, profile.quantization, profile.compile, self.calibration)

    def profile(self) -> ProfileInputs:
        profile = self.request.profile
        return ProfileInputs(
            fingerprint=self.fingerprint,
            model=self.model.tree,
            target=profile.target,
            sla=profile.sla,
            traffic=profile.traffic,
            cost=profile.cost,
            source=self.model.source,
            source_bytes=self.model.source_bytes,
        )

    def scan(self, target: Stored[TargetProfile]) -> ScanInputs:
        profile = self.request.profile
        return ScanInputs(
            fingerprint=self.fingerprint,
            model=self.model.tree,
            target=target,
            sla=profile.sla,
            traffic=profile.traffic,
            config=profile.scan,
            quantization=profile.quantization,
            compile=profile.compile,
            calibration=self.calibration,
        )

    def quantize(self, strategy: Strategy, rejected: Attempt | None = None) -> QuantizeInputs:
        return quantize_inputs(self._shared, strategy.weights, rejected)

    def compile(self, strategy: Strategy, quantized: Stored[QuantizedModel]) -> CompileInputs:
        return compile_inputs(self._shared, strategy, quantized)

    def memory(self, engine: Stored[CompiledModel], target: Stored[TargetProfile]) -> MemoryInputs:
        profile = self.request.profile
        return MemoryInputs(
            fingerprint=self.fingerprint,
            engine=engine,
            target=target,
            sla=profile.sla,
            traffic=profile.traffic,
            config=profile.memory,
            model=self.model.tree,
        )

    def verify(self, engine: Stored[CompiledModel], baseline: Stored[CompiledModel], memory: Stored[MemoryPlan]) -> VerifyInputs:
        profile = self.request.profile
        return VerifyInputs(
            fingerprint=self.fingerprint,
            engine=engine,
            baseline=baseline,
            memory=memory,
            model=self.model.tree,
            golden=self.golden,
            calibration=self.calibration,
            sla=profile.sla,
            traffic=profile.traffic,
            cost=profile.cost,
            config=profile.verify,
        )

    def package(self, stages: SixStages) -> PackageInputs:
        profile, released = self.request.profile, stages.tested[-1]
        return PackageInputs(
            fingerprint=self.fingerprint,
            name=profile.name,
            model_ref=profile.model.ref,
            model=self.model.tree,
            source_bytes=self.model.source_bytes,
            target=stages.target,
            front=stages.front,
            quantized=released.attempt.quantized,
            engine=released.engine,
            baseline_engine=released.baseline,
            memory=released.memory,
            verification=released.attempt.verification,
            attempts=tuple(tested.attempt for tested in stages.tested),
            golden=self.golden,
            calibration_digest=self.calibration.tree.digest,
            source_commit=self.source_commit,
            sla=profile.sla,
            traffic=profile.traffic,
            seeds={"quantization": profile.quantization.seed, "verify": profile.verify.seed},
            required_soak_s=profile.verify.required_soak,
            config=profile.release,
            loader=self._loader(),
        )

    def _loader(self) -> TargetLoader | None:
        """Return the target framework as the release keeps it."""
        loader, target = self.request.loader, self.request.profile.target
        if loader is None:
            return None
        found = None if loader.found is None else f"{loader.found.distribution} {loader.found.version}"
        return TargetLoader(
            framework=loader.target.label,
            found=found,
            device=loader.device.label,
            doubts=loader.doubts,
            python=target.python,
            timeout_s=loader.timeout_s,
        )
