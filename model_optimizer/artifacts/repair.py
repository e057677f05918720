"""What a repair loop did: one record per round, from the first choice to the candidate that was released."""

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.measure import Interval, Verdict
from model_optimizer.artifacts.strategy import FormatName


class LayerRaise(Frozen):
    """One guilty layer that got more bits, and the damage that each form is predicted to do."""

    layer: str
    before: FormatName
    after: FormatName
    kl_before_nats: float
    kl_after_nats: float


class RepairRound(Frozen):
    """One candidate and what the accuracy gate said of it."""

    round: int
    """0 is the scan's choice."""
    strategy: str
    cause: str
    """Why this candidate was made: the scan's choice, layers raised, the next frontier point."""
    raised: tuple[LayerRaise, ...] = ()
    """Against the round before, most harmful first."""
    true_bits_per_weight: float
    predicted_kl_nats: float
    measured_kl_nats: float | None
    difference: float
    """Candidate - baseline on the primary accuracy gate, of 1."""
    interval: Interval
    margin: float
    num_items: int
    verdict: Verdict
    """Of the accuracy gates."""

    def document(self) -> dict[str, object]:
        """Return the round in a few figures, the raised layers only counted."""
        return self.model_dump(mode="json", exclude={"raised"}) | {"num_raised": len(self.raised)}
