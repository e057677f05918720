"""What torch's compiler found out about this CPU, kept beside its cache.

Inductor starts a Python process for every vector instruction set, each importing torch, to see whether what is compiled for
the set can be loaded. It does so again in every process that compiles or reads its cache, though the answer stays the same.
"""

import hashlib
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def vector_sets_kept() -> Iterator[None]:
    """Let the compiler take every vector set that this CPU has where they all stood the test before, and remember if they do.

    The answer holds for one version of torch, one compiler and one set of CPU flags. Law: a setting by the user
    (`TORCHINDUCTOR_VEC_ISA_OK`) stays.
    """
    from torch._inductor import config

    if config.cpp.vec_isa_ok is not None or platform.machine() != "x86_64":
        yield
        return
    known = _place()
    if known.is_file():
        config.cpp.vec_isa_ok = True
    yield
    if config.cpp.vec_isa_ok is None and _all_stood():
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()


def _place() -> Path:
    """Return the file whose presence says that every vector set of this CPU can be used."""
    from torch._inductor.cpu_vec_isa import x86_isa_checker
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    compiler = shutil.which(os.environ.get("CXX", "g++")) or "none"
    changed = Path(compiler).stat().st_mtime_ns if compiler != "none" else 0
    facts = (torch.__version__, compiler, changed, *sorted(x86_isa_checker()))
    return Path(cache_dir()) / f"vector-sets-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def _all_stood() -> bool:
    """Say whether the compiler tried the vector sets of this CPU and refused none."""
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, valid_vec_isa_list, x86_isa_checker

    flags = x86_isa_checker()
    present = [it for it in supported_vec_isa_list if all(flag in flags for flag in str(it).split())]
    tried = valid_vec_isa_list.cache_info().currsize > 0
    return tried and bool(present) and len(valid_vec_isa_list()) == len(present)
