"""Every runtime by name; one file of `backends/` each. Importing this loads no framework."""

from importlib import metadata, util

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.errors import UnsupportedError
from model_optimizer.protocols import RuntimeFactory, Support
from model_optimizer.registry import Registry

RUNTIMES: Registry[RuntimeFactory] = Registry("runtime", "model_optimizer.runtimes.backends")


def installed(*modules: str, install: str) -> Support:
    """Say whether all `modules` can be imported, without importing them; `install` names what brings them."""
    missing = [module for module in modules if util.find_spec(module) is None]
    return Support(not missing, f"{', '.join(missing)} is not installed; run `pip install {install}`" if missing else "")


def framework_version(distribution: str) -> str:
    """Return the installed version of a framework without its build tag (`2.13.0`, not `2.13.0+cpu`).

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError as error:
        raise UnsupportedError(f"{distribution} is not installed; run `pip install {distribution}`") from error


def require_version(engine: Engine, distribution: str) -> str:
    """Return the installed version, which must be the one that the engine was built for.

    Raises:
        UnsupportedError: the framework is missing or has another version.
    """
    version = framework_version(distribution)
    if version != engine.framework_version:
        raise UnsupportedError(
            f"this engine was built for {distribution} {engine.framework_version} and {version} is installed; "
            f"install {distribution}=={engine.framework_version}, or rebuild with `model-optimizer run PROFILE --from compile`"
        )
    return version
