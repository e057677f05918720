"""Result of profile: what the machine, the model and the business are."""

from pydantic import Field

from model_optimizer.artifacts.base import Frozen, StageArtifact


class DeviceFacts(Frozen):
    """One device, stated by the system and measured by micro-benchmarks."""

    kind: str
    """`cpu` or `cuda`."""
    name: str
    num_cores: int
    """Physical CPU cores, or streaming multiprocessors."""
    instruction_sets: tuple[str, ...]
    """CPU flags that matter (`avx2`, `avx512f`, `avx512_vnni`, `amx_int8`) or `sm_90`."""
    cache_bytes: dict[str, int]
    """`l1d`, `l2`, `l3` where known."""
    memory_bytes: int
    memory_free_bytes: int
    copy_bytes_per_s: float
    """Measured copy bandwidth, bytes read plus bytes written."""
    read_bytes_per_s: float
    """Measured read-only bandwidth over a buffer larger than the last-level cache where memory allows."""
    read_cached_bytes_per_s: float | None = None
    """The same over a buffer that the last-level cache holds; None where there is no such cache."""
    matmul_flop_per_s: float
    """Measured dense float32 rate on a CPU, bfloat16 on a GPU."""
    driver: str | None = None
    power_limit_w: float | None = None
    pcie_bytes_per_s: float | None = None
    """One direction."""


class KvLayer(Frozen):
    """Layers that keep the same kind of KV cache."""

    layer_type: str
    """`full_attention`, `sliding_attention`, ..."""
    num_layers: int
    bytes_per_token: int
    """2 x KV heads x head dimension x bytes per value, over all `num_layers` layers (X15)."""
    max_tokens: int | None = None
    """Window of a sliding layer."""


class ModelFacts(Frozen):
    """What config and shard headers say; no weight is loaded for it."""

    architecture: str
    model_type: str
    num_parameters: int
    """Unique parameters; a tied head counts once."""
    num_linear_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    tied_head: bool
    dtype: str
    parameters_by_part: dict[str, int]
    """`attention`, `ffn`, `embedding`, `head`, `norm`, `other`."""
    bytes_by_part: dict[str, int]
    flop_per_token: int
    """2 x (linear + head parameters); attention over context is extra (`flop_per_token_per_context`)."""
    flop_per_token_per_context: int
    """4 x layers x heads x head_dim: attention FLOPs per token and token of context."""
    kv: tuple[KvLayer, ...]
    source_grid: str | None = None
    """The quantization grid that the source weights already lie on, e.g. `4-bit group 32 asymmetric`."""

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.kv)


class BudgetLine(Frozen):
    """One row of a memory budget."""

    part: str
    num_bytes: int
    note: str = ""


class DecisionRow(Frozen):
    """One row of the decision table: current state, target, acceptable cost."""

    metric: str
    current: str
    target: str
    acceptable_cost: str


class Question(Frozen):
    """One of the three bottleneck questions with its answer and the numbers behind it."""

    question: str
    answer: str
    numbers: dict[str, float] = Field(default_factory=dict)


class TargetProfile(StageArtifact):
    device: DeviceFacts
    model: ModelFacts
    budget: tuple[BudgetLine, ...]
    decision_table: tuple[DecisionRow, ...]
    questions: tuple[Question, ...]
