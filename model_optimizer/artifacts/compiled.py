"""Result of compile: one engine for one strategy, with proof that it computes the same."""

from model_optimizer.artifacts.base import Frozen, StageArtifact
from model_optimizer.artifacts.measure import Measure
from model_optimizer.artifacts.strategy import Strategy


class Engine(Frozen):
    """Something that a runtime can open; `directory` is relative to the store entry."""

    runtime: str
    directory: str
    num_bytes: int
    framework_version: str
    """Version of the runtime that it was built for; another version is refused at load."""
    compute_capability: str | None = None
    """Of the one kind of GPU that it runs on, e.g. `sm89`; None where it is not bound to any."""
    driver: str | None = None
    """Of the machine that built it, where it is bound to a GPU."""


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
    executed_by: str | None = None
    """Node that was seen to compute it from its codes in a trial run; several layers may share one."""


class TensorFacts(Frozen):
    """An input or output of an engine."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """A name stands for a free dimension."""


class Layout(Frozen):
    """layout.json: what the engine's graph is made of and what its runtime made of that."""

    level: int
    """0 the graph as it is, 1 with the runtime's fusions, 2 with fused kernels, 3 with what rounds more or searches longer."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: tuple[TensorFacts, ...] = ()
    """Of the inputs and then the outputs, in order."""
    fused: tuple[FusedOp, ...]
    num_ops: dict[str, int] = {}
    """Node kind -> count in the engine's graph."""
    num_executed_ops: dict[str, int] = {}
    """Kernel kind -> count as the runtime executed one token, after its own fusions."""
    fusions: dict[str, int] = {}
    """Fusion of level 2 and 3 -> how often it was made."""
    gains: tuple[Measure, ...] = ()
    """One ratio for each fusion that was made: time of a step without it over with it, measured here."""


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
    """The one that was reached."""
    layout: str
    """Path of layout.json in the entry."""
    reproduce: str | None
    """Path of reproduce.py in the entry; None where nothing was built (torch, level 0)."""
    build_s: float
    asked_level: int | None = None
    """What the profile asks for; None in results of before levels could fall."""
    level_because: str = ""
    """Why another level was reached than asked for."""
