"""What torch's compiler found out about this CPU, kept beside its cache.

Inductor starts a Python process for every vector instruction set, each importing torch, to see whether what is compiled for
the set can be loaded. It does so again in every process that compiles or reads its cache, though the answer stays the same.
"""

import hashlib
import os
import platform
import shutil
from pathlib import Path

import torch


def keep_vector_sets() -> None:
    """Ask once which vector sets the compiler may use, and let it take them all where none failed.

    The answer holds for one version of torch, one compiler and one set of CPU flags. Call before the first compilation: the
    setting is part of the key of what torch keeps. Law: a setting by the user (`TORCHINDUCTOR_VEC_ISA_OK`) stays.

    Raises:
        RuntimeError: there is no compiler that runs.
    """
    from torch._inductor import config

    if config.cpp.vec_isa_ok is not None or platform.machine() != "x86_64":
        return
    known = _place()
    if not known.is_file():
        if not _all_stand():
            return
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
    config.cpp.vec_isa_ok = True


def _place() -> Path:
    """Return the file whose presence says that every vector set of this CPU can be used."""
    from torch._inductor.cpu_vec_isa import x86_isa_checker
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    name = os.environ.get("CXX", "g++")
    compiler = Path(shutil.which(name) or name)
    changed = compiler.stat().st_mtime_ns if compiler.exists() else 0
    facts = (torch.__version__, str(compiler), changed, *sorted(x86_isa_checker()))
    return Path(cache_dir()) / f"vector-sets-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def _all_stand() -> bool:
    """Build and load a library for each vector set of this CPU; say whether there are any and none failed."""
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, valid_vec_isa_list, x86_isa_checker

    flags = x86_isa_checker()
    present = [it for it in supported_vec_isa_list if all(flag in flags for flag in str(it).split())]
    return bool(present) and len(valid_vec_isa_list()) == len(present)
