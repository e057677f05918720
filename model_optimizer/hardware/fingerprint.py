"""One digest of everything about this machine that a measured or compiled result depends on. Loads no framework."""

import functools
import hashlib
import json
import os
import platform
from importlib import metadata

from model_optimizer.hardware.cuda import nvml_facts
from model_optimizer.hardware.system import cpu_model, instruction_sets, physical_cores

LIBRARIES = (
    "torch",
    "transformers",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnx",
    "compressed-tensors",
    "numpy",
    "openvino",
    "triton",
    "tensorrt",
    "tensorrt-rtx",
)


@functools.cache
def fingerprint() -> str:
    """Return the sha256 over CPU, GPUs and driver, Python and library versions."""
    return hashlib.sha256(json.dumps(fingerprint_facts(), sort_keys=True).encode()).hexdigest()


def fingerprint_facts() -> dict[str, str]:
    """Return what the fingerprint covers, for people."""
    facts = {
        "cpu": cpu_model(),
        "instruction_sets": " ".join(instruction_sets()),
        "cores": f"{physical_cores()} physical, {len(os.sched_getaffinity(0))} usable",
        "gpu": "; ".join(f"{gpu.name}, driver {gpu.driver}, compute capability {gpu.compute_capability}" for gpu in nvml_facts()),
        "python": platform.python_version(),
    }
    for name in LIBRARIES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "absent"
    return facts
