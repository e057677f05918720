"""Result of verify: a verdict per dimension with all its figures."""

from model_optimizer.artifacts.base import Frozen, StageArtifact
from model_optimizer.artifacts.measure import Dimension, Interval, Verdict


class GoldenResult(Frozen):
    """The pooled primary sets, one golden set, or one of its slices; baseline and candidate on the same items."""

    golden_set: str
    slice: str | None
    metric: str
    num_items: int
    baseline_ratio: float
    candidate_ratio: float
    difference: float
    """candidate - baseline."""
    interval: Interval
    num_gained: int
    num_lost: int
    """Flips: wrong -> right, right -> wrong."""
    margin: float
    mde: float
    samples_needed: int
    gates: bool
    """Whether the verdict counts: always for the pooled primary gate, for a guard (set or gating slice) only when it
    rejects, never where the baseline sits at floor or ceiling or the part is informative."""
    verdict: Verdict
    reason: str


class LatencyResult(Frozen):
    """Latency and throughput of one engine at the profile's concurrency."""

    strategy: str
    concurrency: int
    num_requests: int
    num_failed: int
    throughput_tok_per_s: float
    percentiles_ms: dict[str, float]
    """`p50`, `p95`, `p99` end to end; `ttft_p50`, `ttft_p95`; `itl_p50`, `itl_p95`."""
    intervals_ms: dict[str, Interval]


class SoakResult(Frozen):
    """What the stress run saw; `requested_s` and `ran_s` say how long it was."""

    requested_s: float
    ran_s: float
    num_segments: int
    num_requests: int
    num_failed: int
    num_non_finite: int
    num_wrong_canaries: int
    """Fixed prompts whose output changed during the run."""
    memory_slope_bytes_per_hour: float
    memory_slope_interval: Interval
    p50_first_ms: float
    """Over the first third of the requests."""
    p50_last_ms: float
    num_canaries: int = 0
    num_sessions: int = 1
    """Processes that worked on it; more than one means that it was interrupted and went on."""
    num_tokens: int = 0


class Verification(StageArtifact):
    golden: tuple[GoldenResult, ...]
    latency: tuple[LatencyResult, ...]
    """Chosen engine first, then the baseline; empty where the accuracy gate rejected before."""
    soak: SoakResult
    """Nothing requested and nothing run where the accuracy gate rejected before."""
    dimensions: dict[Dimension, Verdict]
    verdict: Verdict
    samples: str
    """Path of the raw samples (parquet) in the entry."""
