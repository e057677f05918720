"""Result of compile: one engine for one strategy, with proof that it computes the same."""

from model_optimizer.artifacts.base import Frozen, StageArtifact
from model_optimizer.artifacts.strategy import Strategy


class Engine(Frozen):
    """Something that a runtime can open; `directory` is relative to the store entry."""

    runtime: str
    directory: str
    num_bytes: int
    framework_version: str
    """Version of the runtime that it was built for; another version is refused at load."""


class Parity(Frozen):
    """The engine against the checkpoint on the same tokens."""

    max_abs_logit_difference: float
    mean_kl_nats: float
    top1_agreement_ratio: float
    greedy_tokens_equal: bool
    num_tokens: int
    tolerance_kl_nats: float
    passed: bool


class FusedOp(Frozen):
    """One entry of layout.json."""

    name: str
    kind: str
    """e.g. `MatMulNBits`."""
    tensors: tuple[str, ...]
    bits: int | None = None
    block_size: int | None = None


class Layout(Frozen):
    """layout.json: what the engine's graph is made of and what its runtime made of that."""

    level: int
    """0 the graph as it is, 1 with the runtime's fusions."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fused: tuple[FusedOp, ...]
    num_ops: dict[str, int] = {}
    """Node kind -> count in the engine's graph."""
    num_executed_ops: dict[str, int] = {}
    """Kernel kind -> count as the runtime executed one token, after its own fusions."""


class ExportedModel(StageArtifact):
    """A float32 ONNX model with KV cache, shared by every strategy of one source model."""

    graph: str
    """Path of model.onnx in the entry; its data file lies beside it."""
    num_bytes: int
    export_s: float


class CompiledModel(StageArtifact):
    strategy: Strategy
    engine: Engine
    parity: Parity
    level: int
    layout: str
    """Path of layout.json in the entry."""
    reproduce: str | None
    """Path of reproduce.py in the entry; None where nothing was built (torch, level 0)."""
    build_s: float
