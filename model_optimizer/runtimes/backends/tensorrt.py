"""TensorRT: known by name, not available. The package index of this toolchain offers no TensorRT, and
TensorRT-RTX refuses data-centre GPUs, so nothing here has ever run; it says so instead of pretending."""

from pathlib import Path

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.errors import UnsupportedError
from model_optimizer.protocols import LogitsRuntime, Support
from model_optimizer.runtimes.registry import RUNTIMES

REASON = (
    "no TensorRT runtime is implemented: it needs an NVIDIA GPU and the `tensorrt` package from NVIDIA, "
    "which could not be had to build and test against; use `onnxruntime` or `torch`"
)


class TensorRtFactory:
    """Refuse, naming what is missing."""

    def supports(self, strategy: Strategy) -> Support:
        return Support(False, REASON)

    def open(self, engine: Engine, directory: Path, memory: KvPlan) -> LogitsRuntime:
        """Raise UnsupportedError."""
        raise UnsupportedError(REASON)


RUNTIMES.register("tensorrt")(TensorRtFactory())
