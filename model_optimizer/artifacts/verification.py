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
    """candidate - baseline; the other way round where less is better, so that a loss is always negative."""
    interval: Interval
    num_gained: int
    num_lost: int
    """Flips: wrong -> right, right -> wrong."""
    margin: float
    mde: float
    samples_needed: int
    gates: bool
    """Whether the verdict counts: always for the pooled primary gate and gates of their own, for a guard (set, gating slice,
    other metric) only when it rejects, never where the baseline sits at floor or ceiling or the part is informative."""
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


class Tally(Frozen):
    """A check of the soak that must find nothing: how often it was made, how often it found something, and what first."""

    check: str
    num_checked: int
    num_found: int
    first: str = ""


class Growth(Frozen):
    """Whether one counter grows with the load: its slope per tested hour, less that of the control arm where there is one."""

    counter: str
    unit: str
    per_hour: float
    interval: Interval
    budget_per_hour: float
    num_points: int
    verdict: Verdict
    """Of the bound against the budget; whether it gates is decided where the measures are made."""
    control_per_hour: float | None = None
    control_verdict: Verdict | None = None
    """REJECT: it grows without any load as well."""


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
    equivalent_s: float = 0.0
    """Time of real traffic that it stands for; more than `ran_s` where it was accelerated."""
    gap_s: float = 0.0
    """Between processes; not tested."""
    has_control: bool = False
    stopped_because: str = ""
    """Why it ended before its time; empty where it did not."""
    tallies: tuple[Tally, ...] = ()
    num_digests: int = 0
    num_changed_digests: int = 0
    """Runs of the canaries whose log-probabilities differ in a bit from the first run of their process."""
    is_deterministic: bool = True
    """Whether the canaries gave the same bits over the whole first segment of every process; else bits are not compared."""
    num_control_mismatches: int = 0
    """Runs of the canaries that differ from the control arm's at the same moment."""
    num_drift_samples: int = 0
    num_drifted_samples: int = 0
    drift_nats: float = 0.0
    """Largest change of the mean log-probability of the fixed texts since their first sample."""
    num_drift_flips: int = 0
    """Tokens of the fixed texts whose being the likeliest changed, at most in one sample."""
    growth: tuple[Growth, ...] = ()
    slow_down_ratio: float | None = None
    """Time of the reference workload at the end over the beginning, against the control arm's; None without one."""
    slow_down_interval: Interval | None = None
    cpu_slow_down_ratio: float | None = None
    """The same for the CPU time of the process, which a busy machine hardly changes."""
    cpu_slow_down_interval: Interval | None = None
    jitter_ms: float | None = None
    """P99 - P50 end to end under load."""
    latency_psi: float | None = None
    """Stability index of the end-to-end times, last third against first; None where there are too few."""
    num_preemptions: int = 0
    peak_bytes: int = 0
    """Largest resident size of the process."""
    stable_bytes: int = 0
    """Median resident size at quiesced moments after warm-up."""
    metered_s: float = 0.0
    energy_j: float | None = None
    """Over `metered_s`, idle draw included; None where nothing counts it."""
    idle_w: float = 0.0
    energy_source: str = ""
    """What counted, or why nothing did."""
    sm_ratio: float | None = None
    kernel_ratio: float | None = None
    """Of the GPU: SMs that were busy, and time in which some kernel ran."""
    clock_step_s: float = 0.0
    """Largest step of the wall clock within a segment."""
    output_digest: str = ""
    """Of the load's tokens of all segments, in order; equal for equal accelerated soaks."""


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
