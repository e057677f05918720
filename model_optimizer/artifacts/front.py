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


class Candidate(Frozen):
    """One strategy with its figures. `measures` is empty for a pruned candidate."""

    strategy: Strategy
    predicted: Prediction
    pruned_because: str | None = None
    measures: tuple[Measure, ...] = ()
    """decode throughput, time per token, KL, top-1 flips, engine bytes, resident bytes."""
    speed_ratio: float | None = None
    """Decode throughput over the reference candidate, from interleaved pairs."""
    speed_ratio_interval: Interval | None = None
    dominated: bool = False
    dominated_by: str | None = None
    feasible: bool = False
    infeasible_because: str | None = None


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
