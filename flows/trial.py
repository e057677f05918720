"""One candidate from quantize to verify: the part of the line that a repair runs again."""

from dataclasses import dataclass

from flows.book import Book
from flows.compose import Composer, Tested
from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.base import Stage, Stored
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.strategy.attempts import Trial
from tasks._task import Workplace
from tasks.compile_model import compile_model
from tasks.plan_memory import plan_memory
from tasks.quantize_layers import quantize_layers
from tasks.verify_quality import verify_quality


@dataclass(frozen=True)
class Line:
    """Runs candidates against one unquantized baseline."""

    compose: Composer
    target: Stored[TargetProfile]
    reference: Strategy
    place: Workplace
    book: Book

    def run(self, trial: Trial) -> Tested:
        """Quantize, compile, plan and verify one candidate; what is finished comes from the store."""
        compose, place, number = self.compose, self.place, trial.round
        chosen = f"round{number}" if number else "chosen"

        quantized = quantize_layers(compose.quantize(trial.strategy, trial.rejected), place, chosen)
        unquantized = quantize_layers(compose.quantize(self.reference), place, "baseline")
        self.book.enter(Stage.QUANTIZE, {"chosen": quantized}, round_number=number)
        self.book.close(Stage.QUANTIZE)

        engine = compile_model(compose.compile(trial.strategy, quantized), place, chosen)
        baseline = compile_model(compose.compile(self.reference, unquantized), place, "baseline")
        self.book.enter(Stage.COMPILE, {"chosen": engine, "baseline": baseline}, round_number=number)
        self.book.close(Stage.COMPILE)

        memory = plan_memory(compose.memory(engine, self.target), place, chosen)
        self.book.enter(Stage.MEMORY, {"plan": memory}, round_number=number)
        self.book.close(Stage.MEMORY)

        verification = verify_quality(compose.verify(engine, baseline, memory), place, chosen)
        self.book.enter(Stage.VERIFY, {"verification": verification}, round_number=number)

        attempt = Attempt(
            round=number, strategy=trial.strategy, cause=trial.cause, quantized=quantized, verification=verification
        )
        return Tested(attempt, engine, baseline, memory)
