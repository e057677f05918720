"""Domination and feasibility are two flags; the table of six strategies on an L40S pins both (X1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_optimizer.artifacts.measure import Interval
from model_optimizer.strategy.pareto import Limit, Objective, Point, dominates, dominators, violations

L40S = {
    "fp16": (142, 18.2, 0),
    "fp16-fusion": (118, 18.2, 0),
    "int8-ptq": (95, 9.1, 0.42),
    "int4-qat": (87, 5.1, 0.18),
    "int4-qat-fusion": (76, 5.1, 0.21),
    "int2-qat": (68, 3.2, 1.35),
}
"""P99 ms, memory GB, accuracy loss in percent (S2)."""


def point(label: str, *values: float, spread: float = 0.0) -> Point:
    objectives = (Objective(f"f{i}", v, Interval(lower=v - spread, upper=v + spread)) for i, v in enumerate(values))
    return Point(label, tuple(objectives))


def test_dominators_marks_int8_ptq_and_not_int2_on_the_l40s_table() -> None:
    found = dominators([point(label, *values) for label, values in L40S.items()])
    assert set(found) == {"fp16", "int8-ptq"}
    assert found["fp16"] == "fp16-fusion"
    assert found["int8-ptq"] in ("int4-qat", "int4-qat-fusion")


def test_violations_marks_int2_infeasible_though_not_dominated_on_the_l40s_table() -> None:
    limits = (Limit("loss", "%", at_most=0.3), Limit("memory", "GB", at_most=16))
    broken = {label: violations({"memory": v[1], "loss": v[2]}, limits) for label, v in L40S.items()}
    assert broken["int2-qat"] == "loss 1.35 % is above the limit 0.3"
    assert broken["int4-qat"] is None and broken["int4-qat-fusion"] is None
    assert broken["fp16"] == "memory 18.2 GB is above the limit 16"


def test_violations_joins_all_and_allows_equality() -> None:
    limits = (Limit("speed", "tok/s", at_least=10), Limit("loss", "nats", at_most=0.1))
    assert violations({"speed": 10, "loss": 0.1}, limits) is None
    assert violations({"speed": 9, "loss": 0.2}, limits) == (
        "speed 9 tok/s is below the limit 10; loss 0.2 nats is above the limit 0.1"
    )


@pytest.mark.parametrize(("spread", "expected"), [(0.4, True), (0.6, False)])
def test_dominates_needs_intervals_that_do_not_meet(spread: float, expected: bool) -> None:
    faster, slower = point("a", 10.0, spread=spread), point("b", 11.0, spread=spread)
    assert dominates(faster, slower) is expected
    assert not dominates(slower, faster)


def test_dominators_names_one_that_is_not_dominated_itself() -> None:
    assert dominators([point("worst", 3), point("middle", 2), point("best", 1)]) == {"worst": "best", "middle": "best"}


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.floats(0, 2)), min_size=1, max_size=12))
def test_dominators_always_leaves_a_point(rows: list[tuple[float, float, float]]) -> None:
    points = [point(str(i), a, b, spread=s) for i, (a, b, s) in enumerate(rows)]
    assert len(dominators(points)) < len(points)
