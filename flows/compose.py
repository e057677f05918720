"""What each stage reads: the inputs of the seven stages, built from a request and the stages before.

The one place where a stage's result becomes another stage's input; the flow and `plan` both use it.
"""

from dataclasses import dataclass
from functools import cached_property

from flows.prepare import Request
from model_optimizer.artifacts.base import Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.front import ParetoFront
from model_optimizer.artifacts.memory import MemoryPlan
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.artifacts.verification import Verification
from model_optimizer.compilation.stage import CompileInputs
from model_optimizer.hardware.fingerprint import fingerprint
from model_optimizer.memory.stage import MemoryInputs
from model_optimizer.models.resolve import ResolvedModel
from model_optimizer.profiling.stage import ProfileInputs
from model_optimizer.quantization.calibration import CalibrationSource
from model_optimizer.quantization.stage import QuantizeInputs
from model_optimizer.release.stage import PackageInputs
from model_optimizer.strategy.scan import ScanInputs
from model_optimizer.verification.stage import VerifyInputs


@dataclass(frozen=True)
class Composer:
    """Builds every stage's inputs for one request on this machine."""

    request: Request
    model: ResolvedModel

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint()

    @cached_property
    def calibration(self) -> CalibrationSource:
        return CalibrationSource.of(self.request.profile.calibration, self.request.base)

    @cached_property
    def golden(self) -> tuple[Tree, ...]:
        return tuple(Tree.of(folder) for folder in self.request.golden_sets)
