"""Result of memory: the KV plan and whether it held when really run."""

from model_optimizer.artifacts.base import Frozen, StageArtifact
from model_optimizer.artifacts.target import BudgetLine


class KvPlan(Frozen):
    """How much KV cache an engine may use; written as kv_cache_config.json."""

    page_tokens: int
    num_pages: int
    bytes_per_token: int
    max_batch: int
    max_model_len: int
    precision: str = "float32"
    scale_bytes_per_page: int = 0
    """Page-local scales of an 8-bit cache, over all layers, beside `page_tokens * bytes_per_token`."""

    @property
    def capacity_tokens(self) -> int:
        return self.page_tokens * self.num_pages

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.bytes_per_token + self.scale_bytes_per_page

    @property
    def pool_bytes(self) -> int:
        """Return what all pages take, scales included: to the byte what the native runtime allocates."""
        return self.num_pages * self.page_bytes


class MemoryPlan(StageArtifact):
    kv: KvPlan
    budget: tuple[BudgetLine, ...]
    """Weights, KV reservation, activations, runtime, margin."""
    planned_concurrency: int
    capacity_requests: int
    """Requests of the traffic's p95 length that fit at once."""
    ran_concurrency: int
    """Requests that really ran at the same time in the check."""
    predicted_peak_bytes: int
    measured_peak_bytes: int
    config: str
    """Path of kv_cache_config.json in the entry."""
