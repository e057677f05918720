"""Which optimizer made a bundle: package version and the tested set of libraries. Loads no torch."""

import functools
import hashlib
import re
from importlib import metadata

from model_optimizer.errors import ConfigError
from model_optimizer.paths import data_directory

DISTRIBUTION = "model-optimizer-pipeline"
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)")
_REQUIREMENT = re.compile(r"^[A-Za-z0-9._-]+")


@functools.cache
def package_version() -> str:
    """Return the installed version of the optimizer; `0+source` where it runs without being installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"


@functools.cache
def optimizer_hash() -> str:
    """Return the sha256 over package version and lock.

    The lock is `constraints/cpu.txt` where the project ships it, otherwise the installed versions of
    the direct dependencies.
    """
    return hashlib.sha256(f"{package_version()}\n{_lock()}".encode()).hexdigest()


@functools.cache
def lock_sha256() -> str:
    """Return the sha256 of the lock alone."""
    return hashlib.sha256(_lock().encode()).hexdigest()


@functools.cache
def locked() -> tuple[tuple[str, str], ...]:
    """Return name and version of every library of the lock."""
    return tuple((match[1], match[2]) for line in _lock().splitlines() if (match := _PINNED.match(line)))


def _lock() -> str:
    try:
        constraints = data_directory("constraints") / "cpu.txt"
    except ConfigError:
        return _installed_versions()
    return constraints.read_text(encoding="utf-8") if constraints.is_file() else _installed_versions()


def _installed_versions() -> str:
    """Return `name==version` of every direct dependency that is installed, one per line, sorted."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        requirements = []
    lines = set()
    for requirement in requirements:
        name = _REQUIREMENT.match(requirement)
        if name is None or "extra ==" in requirement:
            continue
        try:
            lines.add(f"{name[0].lower()}=={metadata.version(name[0])}")
        except metadata.PackageNotFoundError:
            lines.add(f"{name[0].lower()} absent")
    return "\n".join(sorted(lines))
