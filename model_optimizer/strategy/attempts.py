"""Which candidate a run tries next: the scan's choice, its repairs, the next frontier point, or none."""

from collections.abc import Sequence
from dataclasses import dataclass

from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.front import Candidate, ParetoFront
from model_optimizer.artifacts.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate that is to go through quantize to verify."""

    round: int
    strategy: Strategy
    cause: str
    rejected: Attempt | None = None
    """What a repair starts from."""


def next_trial(front: ParetoFront, attempts: Sequence[Attempt], max_rounds: int) -> Trial | None:
    """Return what is tried after `attempts`, or None where the last one stands.

    A candidate that is rejected for accuracy has its guilty layers raised, at most `max_rounds` times and while there
    is something to raise; then the next feasible frontier point has its one try.
    """
    if not attempts:
        return Trial(0, front.choice, "the scan's choice")
    last = attempts[-1]
    if not last.rejected_for_accuracy or not last.strategy.weights.quantized:
        return None
    stuck = last.strategy.weights.repairs > 0 and not last.quantized.artifact.raised
    if last.strategy.weights.repairs == last.round < max_rounds and not stuck:
        repairs = last.strategy.weights.repairs + 1
        weights = last.strategy.weights.model_copy(update={"repairs": repairs})
        repaired = last.strategy.model_copy(update={"weights": weights})
        return Trial(last.round + 1, repaired, f"repair {repairs}: the guilty layers of round {last.round} are raised", last)
    if last.strategy != front.choice and last.strategy.weights.repairs == 0:
        return None
    following = _next_point(front)
    if following is None:
        return None
    return Trial(last.round + 1, following.strategy, f"the next feasible frontier point after {front.choice.label}")


def _next_point(front: ParetoFront) -> Candidate | None:
    """Return the quantized candidate of best score among the feasible, non-dominated ones that is not the choice."""
    points = [
        it
        for it in front.candidates
        if it.feasible and not it.dominated and it.strategy.weights.quantized and it.strategy != front.choice
    ]
    return max(points, key=lambda it: it.score_ratio or 0.0, default=None)
