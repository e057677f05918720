"""Results that hold on one kind of GPU only, and the key that keeps them apart: capability, driver, library and its version.

Kernel timings are such results. A file of them names its key and its digest, so that timings of another GPU, of another version,
or cut short by a full disk are never read as these.
"""

import hashlib
import json
import re
from pathlib import Path

from pydantic import ValidationError

from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import IntegrityError, UnsupportedError
from model_optimizer.hardware.cuda import nvml_facts
from model_optimizer.store import canonical_json, write_atomically

NO_DRIVER = "none"
"""Driver of a build on a machine without a GPU."""


class GpuKey(Frozen):
    """What a GPU-specific result depends on; results of two keys are never shared."""

    compute_capability: str
    """e.g. `sm89`."""
    driver: str
    library: str
    library_version: str

    @property
    def name(self) -> str:
        """Return the key as a file's name."""
        parts = (self.library, self.library_version, self.compute_capability, self.driver)
        return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part) for part in parts)


class _Header(Frozen):
    key: GpuKey
    sha256: str


def gpu_key(library: str, version: str, gpu: str | None) -> GpuKey:
    """Return the key of a build for a named GPU, or for this machine's.

    Raises:
        UnsupportedError: no GPU was named and there is none.
    """
    present = nvml_facts()
    driver = present[0].driver if present else NO_DRIVER
    if gpu is None:
        if not present or present[0].compute_capability is None:
            raise UnsupportedError(
                f"{library} builds for this machine's GPU and there is none; name one: compile.tensorrt_gpu: sm89"
            )
        gpu = "sm" + present[0].compute_capability.replace(".", "")
    return GpuKey(compute_capability=gpu, driver=driver, library=library, library_version=version)


def write_timings(path: Path, key: GpuKey, timings: bytes) -> None:
    """Write kernel timings so that `read_timings` of the same key gives them back."""
    header = _Header(key=key, sha256=hashlib.sha256(timings).hexdigest())
    write_atomically(path, canonical_json(header) + b"\n" + timings)


def read_timings(path: Path, key: GpuKey) -> bytes:
    """Return the timings of a file; none where there is no file.

    Raises:
        IntegrityError: it is damaged, or was written for another key.
    """
    if not path.is_file():
        return b""
    first, _, timings = path.read_bytes().partition(b"\n")
    remedy = "remove it, and the build measures anew"
    try:
        header = _Header.model_validate(json.loads(first))
    except (ValueError, ValidationError) as error:
        raise IntegrityError(f"timing cache {path} is damaged: it does not say what it is for; {remedy}") from error
    if header.key != key:
        stated, wanted = header.key.model_dump(), key.model_dump()
        other = ", ".join(f"{name} {stated[name]} (wanted {wanted[name]})" for name in stated if stated[name] != wanted[name])
        raise IntegrityError(f"timing cache {path} holds timings of another {other}; {remedy}")
    if hashlib.sha256(timings).hexdigest() != header.sha256:
        raise IntegrityError(f"timing cache {path} is damaged: its content is not what was written; {remedy}")
    return timings
