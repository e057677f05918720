"""What an engine was built with, written beside it, and held against the host before anything is loaded.

Three rules, one for each part of the triple. Train framework: told, never refused; weights are numbers. Optimizer: a bundle is
opened by the optimizer hash in its sign-off record, an unsigned engine by the package version that built it. Inference framework:
an engine opens in the very release that built it and, where it is bound to a GPU, on that compute capability under that driver; a
checkpoint that a framework was checked with is served by the same minor version.
"""

import json
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.triple import Component, Triple
from model_optimizer.errors import IntegrityError, UnsupportedError
from model_optimizer.hardware.cuda import nvml_facts
from model_optimizer.runtimes.versions import Found, minor_of, same_release

ORIGIN = "engine.json"
NOT_STATED = "not stated"
ABSENT = "none"
OPTIMIZER = "model-optimizer-pipeline"
DISTRIBUTIONS = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt", "tensorrt-rtx"),
    "torch": ("torch",),
}
"""Runtime -> distributions whose version an engine of it records."""
_REBUILD = "build it again here: `model-optimizer quantize ... --target-framework {}`, or `run PROFILE --from compile`"


class EngineOrigin(Frozen):
    """engine.json: what built an engine, and the one kind of GPU that it runs on."""

    runtime: str
    framework_version: str
    optimizer_version: str
    compute_capability: str | None = None
    driver: str | None = None


def origin_of(engine: Engine) -> EngineOrigin:
    """Return what is written beside an engine that this optimizer built."""
    return EngineOrigin(
        runtime=engine.runtime,
        framework_version=engine.framework_version,
        optimizer_version=_optimizer_version(),
        compute_capability=engine.compute_capability,
        driver=engine.driver,
    )


def read_origin(directory: Path) -> EngineOrigin | None:
    """Return what lies beside an engine; None where nothing does.

    Raises:
        IntegrityError: it is damaged.
    """
    path = directory / ORIGIN
    if not path.is_file():
        return None
    try:
        return EngineOrigin.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        said = " ".join(str(error).split())[:200]
        raise IntegrityError(f"{path} does not say what built the engine: {said}; build the engine again") from error


def refuse_foreign(origin: EngineOrigin, *, signed: bool) -> None:
    """Refuse an engine that was built elsewhere; `signed`: the sign-off record vouches for the optimizer.

    Raises:
        UnsupportedError: one line with every field that differs, built with and found, and how to build it again.
    """
    built = {"framework": f"{origin.runtime} {origin.framework_version}"}
    found = {"framework": _framework_here(origin)}
    if origin.compute_capability is not None:
        built |= {"GPU": origin.compute_capability, "driver": origin.driver or NOT_STATED}
        found |= _gpu_here()
    if not signed:
        built |= {"optimizer": origin.optimizer_version}
        found |= {"optimizer": _optimizer_version()}
    differing = [name for name in built if not _equal(built[name], found[name])]
    if differing:
        each = "; ".join(f"{name}: built with {built[name]}, found {found[name]}" for name in differing)
        raise UnsupportedError(f"the {origin.runtime} engine was built elsewhere: {each}; {_REBUILD.format(origin.runtime)}")


def _equal(built: str, found: str) -> bool:
    (name, _, version), (other, _, there) = built.rpartition(" "), found.rpartition(" ")
    return built == found or (bool(name) and name == other and same_release(version, there))


def _framework_here(origin: EngineOrigin) -> str:
    found = next(iter(_installed(origin.runtime)), None)
    return f"{origin.runtime} {ABSENT} (backend not available)" if found is None else f"{origin.runtime} {found.version}"


def _installed(runtime: str) -> list[Found]:
    found = []
    for name in DISTRIBUTIONS.get(runtime, ()):
        try:
            found.append(Found(name, metadata.version(name).partition("+")[0]))
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpu_here() -> dict[str, str]:
    present = nvml_facts()
    if not present:
        return {"GPU": ABSENT, "driver": ABSENT}
    capability = present[0].compute_capability
    return {"GPU": NOT_STATED if capability is None else "sm" + capability.replace(".", ""), "driver": present[0].driver}


def _optimizer_version() -> str:
    try:
        return metadata.version(OPTIMIZER)
    except metadata.PackageNotFoundError:
        return "0+source"


def refuse_unchecked_version(triple: Triple, runtime: str, version: str) -> str:
    """Return what is known of a server that loads the checkpoint, in words.

    Raises:
        UnsupportedError: it was checked with another minor version.
    """
    checks = [check for check in triple.checked if check.framework == runtime]
    if not checks:
        return f"NOT CHECKED with {runtime} {version} ({triple.unchecked_because or 'another framework was checked'})"
    if all(minor_of(check.version) != minor_of(version) for check in checks):
        known = ", ".join(check.version for check in checks)
        raise UnsupportedError(
            f"this model was checked with {runtime} {known} and {runtime} {version} would serve it; install "
            f"{runtime}=={known}, or release it again with target.framework: {runtime}=={version}"
        )
    return f"checked with {runtime} {', '.join(check.version for check in checks)}"


def training_framework(model: Path) -> Component:
    """Return the framework that wrote a Hugging Face directory, as its config.json says."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        version = config.get("transformers_version")
    except (OSError, ValueError, AttributeError):
        version = None
    return Component(name="transformers", version=version if isinstance(version, str) else NOT_STATED)
