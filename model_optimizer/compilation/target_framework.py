"""The framework that a user names as target: read, held against what is installed and against the support matrix."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from model_optimizer.compilation.support import FRAMEWORKS, Device, Framework, Scheme, refuse_unsupported
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.runtimes.versions import Found, find_in, minor_of, same_release

_EXPORTED = ("onnxruntime", "openvino", "tensorrt")
"""Frameworks whose engines are made of the ONNX export."""
_STATED = re.compile(r"(?P<name>[a-z][a-z_-]*)(==(?P<version>\d+(\.\d+)*))?")


@dataclass(frozen=True, slots=True)
class TargetFramework:
    """A known framework, the version that was stated, and the interpreter that was named."""

    framework: Framework
    version: str | None
    python: Path | None = None

    @classmethod
    def read(cls, text: str, python: Path | None = None) -> "TargetFramework":
        """Read `vllm==0.24.0` or `vllm`.

        Raises:
            ConfigError: it is written otherwise, or names a framework that nobody knows.
        """
        match = _STATED.fullmatch(text)
        if match is None:
            raise ConfigError(f"target framework {text!r} is no NAME or NAME==VERSION; e.g. vllm==0.24.0")
        return cls(FRAMEWORKS.get(match["name"]), match["version"], python)

    @property
    def name(self) -> str:
        return self.framework.name

    @property
    def label(self) -> str:
        return self.name if self.version is None else f"{self.name}=={self.version}"

    def check(self, schemes: Iterable[Scheme], device: Device) -> tuple[str, ...]:
        """Return doubts, after making sure that the framework is there where it must be and runs every scheme.

        Raises:
            ConfigError: there is no such interpreter.
            UnsupportedError: another version is installed than was stated, none is, or a scheme is refused.
        """
        doubts = refuse_unsupported(self.framework, schemes, device)
        found = self.found()
        version = self.version or (found.version if found else None)
        checked = self.framework.checked
        if version is not None and checked and minor_of(version) not in checked:
            known = ", ".join(checked)
            doubts += (f"{self.name} {version}: the support matrix was found with {known}; the load canary decides",)
        return doubts

    def found(self) -> Found | None:
        """Return the framework as the interpreter has it that will load the result; None where that is not here.

        An engine is built and opened by this interpreter, so that its framework must be installed here in the very release.

        Raises:
            ConfigError: there is no such interpreter.
            UnsupportedError: it has no such framework, or another version than was stated.
        """
        framework = self.framework
        if self.python is not None:
            found = find_in(self.python, framework.distributions) if framework.distributions else None
            if found is None:
                raise UnsupportedError(f"target.python {self.python} has no {self.name}; install it there: {framework.install}")
            self._refuse_other(found, f"target.python {self.python}")
            if framework.loads != "engine":
                return found
        if framework.loads != "engine":
            return None
        here = _installed(framework.distributions)
        if here is None:
            raise UnsupportedError(f"{self.name} is not installed, and builds the engine here: {framework.install}")
        self._refuse_other(here, "this environment")
        return here

    def _refuse_other(self, found: Found, where: str) -> None:
        """Refuse another version: of an engine's framework another release, of a checkpoint's another minor version."""
        if self.version is None:
            return
        exact = self.framework.loads == "engine"
        if not (same_release(self.version, found.version) if exact else minor_of(self.version) == minor_of(found.version)):
            raise UnsupportedError(
                f"{self.label} is the target and {where} has {found.distribution} {found.version}; "
                f"install {found.distribution}=={self.version} there, or state {self.name}=={found.version}"
            )


@dataclass(frozen=True, slots=True)
class Loader:
    """The framework that will load the result: as it was found where an interpreter was named, and on which device."""

    target: TargetFramework
    device: Device
    found: Found | None
    doubts: tuple[str, ...]
    timeout_s: float = 900.0

    @classmethod
    def of(cls, target: TargetFramework, schemes: Iterable[Scheme], device: Device, timeout_s: float = 900.0) -> "Loader":
        """Make sure that it can be had and runs every scheme.

        Raises:
            ConfigError: there is no such interpreter.
            UnsupportedError: it is missing, has another version, or does not run a scheme.
        """
        doubts = target.check(schemes, device)
        return cls(target, device, target.found() if target.python else None, doubts, timeout_s)


def refuse_architecture(runtime: str, model: Path) -> None:
    """Refuse a model that the ONNX graph cannot draw, before anything is made of it; torch runs all of them.

    Raises:
        UnsupportedError: names the part.
    """
    if runtime not in _EXPORTED:
        return
    from model_optimizer.compilation.export import unsupported_part
    from model_optimizer.formats.model_config import read_config

    if reason := unsupported_part(read_config(model)):
        raise UnsupportedError(
            f"{runtime} reads an ONNX graph and {model.name} cannot be drawn as one: {reason}; target torch or vllm"
        )


def _installed(distributions: tuple[str, ...]) -> Found | None:
    for name in distributions:
        try:
            return Found(name, metadata.version(name).partition("+")[0])
        except metadata.PackageNotFoundError:
            continue
    return None
