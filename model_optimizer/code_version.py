"""Which code made a store entry: a digest over the sources that a stage can reach.

The reach is the import closure at package granularity, read from the sources themselves, so that a
change in `reporting` does not spoil what `profiling` has made.
"""

import functools
import hashlib
import re
from pathlib import Path

from model_optimizer.paths import PACKAGE_ROOT

_IMPORT = re.compile(r"^\s*(?:from|import)\s+model_optimizer\.(\w+)", re.MULTILINE)


def _sources(package: str) -> list[Path]:
    """Return the files of a package or single module of the engine."""
    module = PACKAGE_ROOT / f"{package}.py"
    return [module] if module.is_file() else sorted((PACKAGE_ROOT / package).rglob("*.py"))


@functools.cache
def _imports(package: str) -> frozenset[str]:
    return frozenset(name for path in _sources(package) for name in _IMPORT.findall(path.read_text(encoding="utf-8")))


def reachable_packages(package: str) -> tuple[str, ...]:
    """Return `package` and every engine package that it imports, directly or not, sorted."""
    seen: set[str] = set()
    waiting = {package}
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= _imports(name) - seen
    return tuple(sorted(seen))


@functools.cache
def code_version(package: str) -> str:
    """Return the sha256 over names and contents of all sources that `package` can reach."""
    digest = hashlib.sha256()
    for name in reachable_packages(package):
        for path in _sources(name):
            digest.update(path.relative_to(PACKAGE_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
