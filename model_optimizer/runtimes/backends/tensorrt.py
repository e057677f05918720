"""TensorRT: engines are built (`compilation/targets/tensorrt.py`), not run. This toolchain's package index has no TensorRT for
data-centre GPUs, and TensorRT-RTX refuses those, so no engine has ever run; this says so instead of pretending."""

from pathlib import Path

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.errors import UnsupportedError
from model_optimizer.protocols import LogitsRuntime, Support
from model_optimizer.runtimes.registry import RUNTIMES

REASON = (
    "no TensorRT runtime is implemented: engines can be built, but no NVIDIA GPU that runs them could be had to test against; "
    "use `onnxruntime`, `openvino` or `torch`"
)


class TensorRtFactory:
    """Refuse, naming what is missing."""

    def supports(self, strategy: Strategy) -> Support:
        return Support(False, REASON)

    def open(self, engine: Engine, directory: Path, memory: KvPlan) -> LogitsRuntime:
        """Raise UnsupportedError."""
        raise UnsupportedError(REASON)


RUNTIMES.register("tensorrt")(TensorRtFactory())
