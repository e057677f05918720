"""Result of scan: every candidate with its figures and flags, and the choice."""

from model_optimizer.artifacts.base import Frozen, StageArtifact
from model_optimizer.artifacts.measure import Interval, Measure
from model_optimizer.artifacts.strategy import Strategy


class Prediction(Frozen):
    """What the roofline says of a candidate before anything runs."""

    decode_tok_per_s: float
    """At the scan's concurrency."""
    resident_bytes: int
    kl_nats: float
    """From the one-pass sensitivity; 0 for an unquantized candidate."""
    kl_upper_guess: str | None = None
    """Why the true KL may well lie far below `kl_nats`; None where `kl_nats` is an estimate."""


class Candidate(Frozen):
    """One strategy with its figures. `measures` is empty for a pruned candidate."""

    strategy: Strategy
    predicted: Prediction
    pruned_because: str | None = None
    measures: tuple[Measure, ...] = ()
    """`generation_throughput` (tok_per_s), `time_per_token` (ms), `latency_p50`, `latency_p95` (ms), `kl` (nats),
    `flips` (ratio), `engine`, `resident`, `opened` (bytes); `baseline` of each is the front's baseline."""
    speed_ratio: float | None = None
    """Decode throughput over the front's baseline, from interleaved pairs."""
    speed_ratio_interval: Interval | None = None
    dominated: bool = False
    dominated_by: str | None = None
    feasible: bool = False
    infeasible_because: str | None = None
    score_ratio: float | None = None
    """0.4 latency improvement + 0.3 memory reduction + 0.2 accuracy preservation + 0.1 cost saving; the baseline has 0.2."""


class ParetoFront(StageArtifact):
    candidates: tuple[Candidate, ...]
    choice: Strategy
    baseline: Strategy
    """The fastest measured unquantized candidate: the denominator of every ratio."""
    picture: str | None = None
    """Path of the SVG in the entry."""

    def candidate(self, strategy: Strategy) -> Candidate:
        """Return the candidate of `strategy`; it is a bug to ask for one that was not scanned."""
        return next(candidate for candidate in self.candidates if candidate.strategy == strategy)
