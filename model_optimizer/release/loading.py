"""Before anything is published: the target framework, where its interpreter is known, loads what is to be released."""

from dataclasses import dataclass

from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.measure import Measure
from model_optimizer.artifacts.triple import Component, LoadCheck, Triple
from model_optimizer.compilation.canary import check_decision, check_load, check_measures, skipped_decision
from model_optimizer.compilation.support import Device
from model_optimizer.compilation.target_framework import Loader, TargetFramework
from model_optimizer.decisions import Decision
from model_optimizer.protocols import Progress
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.version import DISTRIBUTION, package_version
from model_optimizer.runtimes.triple import training_framework

NO_TARGET = "no target framework was stated (target.framework)"
BASELINE = "the baseline is not loaded by the canary"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of the load canary; `check` None: it did not run, and `because` says why."""

    check: LoadCheck | None = None
    because: str = NO_TARGET
    framework: str = "the target framework"
    doubts: tuple[str, ...] = ()

    def decision(self) -> Decision:
        return skipped_decision(self.framework, self.because) if self.check is None else check_decision(self.check)

    def measures(self) -> tuple[Measure, ...]:
        return check_measures(self.check, self.because)

    def triple(self, inputs: PackageInputs, compiled: CompiledModel) -> Triple:
        """Return the three frameworks of a bundle, and who has loaded it."""
        engine = compiled.engine
        return Triple(
            training=training_framework(inputs.model.path),
            optimizer=Component(name=DISTRIBUTION, version=package_version()),
            inference=Component(name=engine.runtime, version=engine.framework_version),
            checked=() if self.check is None else (self.check,),
            unchecked_because=self.because if self.check is None else None,
        )


def load_in_target(inputs: PackageInputs, progress: Progress) -> Loaded:
    """Let the target framework load the checkpoint, or its own engine, in its own interpreter.

    Raises:
        ConfigError: its interpreter is gone.
        UnsupportedError: it does not run a layer's scheme, does not load the result, or says other tokens; nothing was published.
    """
    stated = inputs.loader
    if stated is None:
        return Loaded()
    target = TargetFramework.read(stated.framework, stated.python)
    loader = Loader(target, Device.named(stated.device), target.found() if stated.python else None, (), stated.timeout_s)
    quantized = inputs.quantized
    stored = quantized.artifact.checkpoint
    checkpoint = inputs.model.path if stored is None else quantized.directory / stored
    engine = inputs.engine.artifact.engine
    place = inputs.engine.directory / engine.directory if engine.runtime == target.name else checkpoint
    progress.note(f"load canary: {target.label}")
    check, because = check_load(loader, place, checkpoint)
    return Loaded(check, because, target.label, stated.doubts)
