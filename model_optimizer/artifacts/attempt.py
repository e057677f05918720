"""One candidate of a run that went through quantize, compile, memory and verify: what a repair starts from."""

from pydantic import Field

from model_optimizer.artifacts.base import Frozen, Stored
from model_optimizer.artifacts.measure import Dimension, Verdict
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.repair import RepairRound
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.verification import Verification


class Attempt(Frozen):
    """A finished candidate. Its identity is what it was made of, not what was said of it."""

    round: int
    strategy: Strategy
    cause: str = Field(exclude=True)
    quantized: Stored[QuantizedModel]
    verification: Stored[Verification]

    @property
    def rejected_for_accuracy(self) -> bool:
        return self.verification.artifact.dimensions[Dimension.ACCURACY] is Verdict.REJECT

    def record(self) -> RepairRound:
        """Return the round as the report shows it."""
        quantized, verification = self.quantized.artifact, self.verification.artifact
        primary = verification.golden[0]
        kl = next((measure.value for measure in verification.measures if measure.name == "held_out_kl"), None)
        return RepairRound(
            round=self.round,
            strategy=self.strategy.label,
            cause=self.cause,
            raised=quantized.raised,
            true_bits_per_weight=quantized.coverage.true_bits_per_weight,
            predicted_kl_nats=quantized.predicted_kl_nats,
            measured_kl_nats=kl,
            difference=primary.difference,
            interval=primary.interval,
            margin=primary.margin,
            num_items=primary.num_items,
            verdict=verification.dimensions[Dimension.ACCURACY],
        )
