"""Which versions go together, and which version another interpreter has.

An engine opens only in the version of its framework that built it. A checkpoint is read by its framework's minor version that
was checked with it: `0.24.1` reads what `0.24.0` was checked with, `0.25.0` does not count as checked.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from model_optimizer.errors import ConfigError, UnsupportedError

LOOK_TIMEOUT_S = 30.0
_LOOK = """
import json, sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        print(json.dumps([name, metadata.version(name)]))
        break
    except metadata.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A distribution that an interpreter has; its version without the build tag."""

    distribution: str
    version: str


def minor_of(version: str) -> str:
    """Return the first two numbers: `0.24` of `0.24.1+cu130`; what has but one keeps it."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def same_release(stated: str, found: str) -> bool:
    """Return whether two versions are the same release; `1.32` is `1.32.0`."""
    left, right = (version.partition("+")[0].split(".") for version in (stated, found))
    length = max(len(left), len(right))
    return left + ["0"] * (length - len(left)) == right + ["0"] * (length - len(right))


def find_in(python: Path, distributions: tuple[str, ...]) -> Found | None:
    """Return the first of the distributions that an interpreter has; the framework itself is not loaded.

    Raises:
        ConfigError: there is no such file.
        UnsupportedError: it does not run as an interpreter.
    """
    program = python.expanduser().absolute()
    if not program.is_file():
        raise ConfigError(f"target.python {python} is no file; name an interpreter that has the framework, ENV/bin/python")
    try:
        done = subprocess.run(
            [str(program), "-c", _LOOK, *distributions],
            capture_output=True,
            text=True,
            timeout=LOOK_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != "PYTHONHOME"},
        )
        told = json.loads(done.stdout) if done.stdout.strip() else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"target.python {python} does not run as a Python interpreter: {error}; check the path") from error
    if done.returncode:
        raise UnsupportedError(f"target.python {python} does not run as a Python interpreter: {_last_line(done.stderr)}")
    return None if told is None else Found(str(told[0]), str(told[1]).partition("+")[0])


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
