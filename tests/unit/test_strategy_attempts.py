"""What a run tries next: repairs up to the limit, one more frontier point, the end."""

from attempt_fixtures import attempt, verification

from model_optimizer.artifacts.attempt import Attempt
from model_optimizer.artifacts.front import Candidate, ParetoFront, Prediction
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.strategy.attempts import next_trial

BASELINE = Strategy(weights=WeightRecipe(), runtime="torch")
INT4 = Strategy(weights=WeightRecipe(method="rtn", formats=("int4-g64",)), runtime="torch")
INT8 = Strategy(weights=WeightRecipe(method="rtn", formats=("int8-channel",)), runtime="torch")
MIXED = Strategy(weights=WeightRecipe(method="rtn", formats=("int4-g64", "int8-channel"), bits_budget=6.0), runtime="torch")


def candidate(strategy: Strategy, score: float, *, feasible: bool = True, dominated: bool = False) -> Candidate:
    predicted = Prediction(decode_tok_per_s=1.0, resident_bytes=1, kl_nats=0.0)
    return Candidate(strategy=strategy, predicted=predicted, feasible=feasible, dominated=dominated, score_ratio=score)


def front(*others: Candidate, choice: Strategy = INT4) -> ParetoFront:
    return ParetoFront(candidates=(candidate(BASELINE, 0.2), candidate(INT4, 0.5), *others), choice=choice, baseline=BASELINE)


def run(points: ParetoFront, verdicts: list[Verdict], max_rounds: int) -> list[Attempt]:
    """Play a run whose accuracy gate answers `verdicts` one after the other."""
    attempts: list[Attempt] = []
    while trial := next_trial(points, attempts, max_rounds):
        found = verification(verdicts[min(len(attempts), len(verdicts) - 1)])
        attempts.append(attempt(trial.strategy, found, round_number=trial.round))
    return attempts


def labels(attempts: list[Attempt]) -> list[str]:
    return [it.strategy.weights.label for it in attempts]


def test_next_trial_ends_with_the_choice_when_it_is_accepted() -> None:
    assert labels(run(front(), [Verdict.ACCEPT], 3)) == ["int4-g64-rtn"]


def test_next_trial_does_not_repair_what_is_only_inconclusive() -> None:
    assert labels(run(front(), [Verdict.INCONCLUSIVE], 3)) == ["int4-g64-rtn"]


def test_next_trial_repairs_until_the_gate_accepts() -> None:
    found = run(front(candidate(INT8, 0.3)), [Verdict.REJECT, Verdict.REJECT, Verdict.ACCEPT], 3)
    assert labels(found) == ["int4-g64-rtn", "int4-g64-rtn-repair1", "int4-g64-rtn-repair2"]


def test_next_trial_takes_the_best_other_frontier_point_after_the_last_repair_and_then_ends() -> None:
    points = front(candidate(MIXED, 0.31), candidate(INT8, 0.35), candidate(BASELINE, 0.9))
    found = run(points, [Verdict.REJECT], 2)
    assert labels(found) == ["int4-g64-rtn", "int4-g64-rtn-repair1", "int4-g64-rtn-repair2", "int8-channel-rtn"]
    assert [it.round for it in found] == [0, 1, 2, 3]


def test_next_trial_passes_over_dominated_infeasible_and_unquantized_points() -> None:
    points = front(candidate(INT8, 0.4, feasible=False), candidate(MIXED, 0.4, dominated=True))
    assert labels(run(points, [Verdict.REJECT], 1)) == ["int4-g64-rtn", "int4-g64-rtn-repair1"]


def test_next_trial_skips_repairs_when_none_is_allowed() -> None:
    assert labels(run(front(candidate(INT8, 0.3)), [Verdict.REJECT], 0)) == ["int4-g64-rtn", "int8-channel-rtn"]


def test_next_trial_does_not_repair_an_unquantized_choice() -> None:
    assert labels(run(front(choice=BASELINE), [Verdict.REJECT], 3)) == ["float32"]


def test_next_trial_hands_the_repair_the_attempt_that_it_repairs() -> None:
    first = attempt(INT4, verification(Verdict.REJECT))
    trial = next_trial(front(), [first], 3)
    assert trial is not None and trial.rejected is first and trial.strategy.weights.repairs == 1


def test_next_trial_leaves_a_repair_that_found_nothing_to_raise() -> None:
    weights = INT4.weights.model_copy(update={"repairs": 1})
    stuck = attempt(Strategy(weights=weights, runtime="torch"), verification(Verdict.REJECT), round_number=1, stuck=True)
    trial = next_trial(front(candidate(INT8, 0.3)), [attempt(INT4, verification(Verdict.REJECT)), stuck], 3)
    assert trial is not None and trial.strategy == INT8
