"""The score ranks feasible candidates and never buys speed with accuracy beyond the limit (X2)."""

from dataclasses import replace

import pytest

from model_optimizer.errors import UnsupportedError
from model_optimizer.strategy.choose import Option, choose, score

BASE = Option("float32/fast", False, 10.0, 1000, 0.0, None, None)
SLOW = Option("float32/slow", False, 20.0, 1000, 0.0, "float32/fast", None)
INT8 = Option("int8/fast", True, 6.0, 500, 0.01, None, None)
INT4 = Option("int4/fast", True, 3.0, 100, 0.30, None, "kl 0.3 nats is above the limit 0.05")


def test_score_is_the_weighted_sum_of_four_shares() -> None:
    # latency 1 - 6/10 = 0.4, memory 0.5, accuracy 1 - 0.01/0.05 = 0.8, cost as latency
    assert score(INT8, BASE, 0.05) == pytest.approx(0.4 * 0.4 + 0.3 * 0.5 + 0.2 * 0.8 + 0.1 * 0.4)
    assert score(BASE, BASE, 0.05) == pytest.approx(0.2)


def test_choose_keeps_accuracy_hard_though_the_score_prefers_another() -> None:
    choice = choose([BASE, SLOW, INT8, INT4], max_kl_nats=0.05)
    assert choice.chosen == "int8/fast"
    assert choice.scores["int4/fast"] > choice.scores["int8/fast"]
    assert choice.fallback is None


def test_choose_takes_the_fastest_unquantized_as_baseline() -> None:
    assert choose([SLOW, BASE, INT8], max_kl_nats=0.05).baseline == "float32/fast"


def test_choose_says_of_every_candidate_why_with_numbers() -> None:
    dominated = replace(INT8, label="int8/slow", time_per_token_ms=12.0, dominated_by="int8/fast")
    choice = choose([BASE, SLOW, INT8, INT4, dominated], max_kl_nats=0.05)
    why = {decision.subject: decision for decision in choice.decisions}
    assert set(why) == {"float32/fast", "float32/slow", "int8/fast", "int4/fast", "int8/slow"}
    assert why["int8/fast"].choice == "chosen"
    assert why["int4/fast"].because.startswith("infeasible: kl 0.3")
    assert why["int8/slow"].because == "dominated by int8/fast"
    assert why["float32/fast"].because == "its score is below that of int8/fast"
    assert why["float32/fast"].numbers["chosen_score_ratio"] == pytest.approx(choice.scores["int8/fast"])


def test_choose_takes_the_fastest_unquantized_when_nothing_quantized_is_feasible() -> None:
    choice = choose([SLOW, BASE, INT4], max_kl_nats=0.05)
    assert (choice.chosen, choice.fallback) == ("float32/fast", None)
    assert choice.decisions[0].because == "no quantized candidate keeps every limit, so the fastest unquantized one is taken"


def test_choose_says_which_limit_the_fallback_breaks_when_nothing_is_feasible() -> None:
    too_big = replace(BASE, infeasible_because="serving_memory 9 GiB is above the limit 8")
    assert choose([too_big, INT4], max_kl_nats=0.05).fallback == "serving_memory 9 GiB is above the limit 8"


def test_choose_keeps_an_unquantized_candidate_when_it_scores_best() -> None:
    worse = replace(INT8, time_per_token_ms=30.0, resident_bytes=990)
    assert choose([BASE, worse], max_kl_nats=0.05).chosen == "float32/fast"


SLOWER = "slower here than float32/fast: 0.6 [0.5, 0.7] of its throughput"


def test_choose_passes_over_what_is_surely_slower_here() -> None:
    small = replace(INT8, label="int8/small", resident_bytes=10, time_per_token_ms=12.0, slower_because=SLOWER)
    choice = choose([BASE, small], max_kl_nats=0.05)
    assert choice.scores["int8/small"] > choice.scores["float32/fast"] and choice.chosen == "float32/fast"
    assert {it.subject: it.because for it in choice.decisions} == {
        "float32/fast": "no quantized candidate keeps every limit and is no slower here, so the fastest unquantized one is taken",
        "int8/small": SLOWER,
    }


def test_choose_takes_a_slower_engine_when_nothing_else_keeps_the_limits() -> None:
    too_big = replace(BASE, infeasible_because="serving_memory 9 GiB is above the limit 8")
    choice = choose([too_big, replace(INT8, slower_because=SLOWER)], max_kl_nats=0.05)
    assert (choice.chosen, choice.fallback) == ("int8/fast", None)
    assert choice.decisions[0].because.endswith(f"although it is {SLOWER}")


def test_choose_takes_the_pinned_precision_although_it_breaks_the_limit() -> None:
    choice = choose([BASE, SLOW, INT4], max_kl_nats=0.05, pinned="int4-g64")
    assert (choice.chosen, choice.baseline) == ("int4/fast", "float32/fast")
    assert choice.fallback == "kl 0.3 nats is above the limit 0.05"
    first = choice.decisions[0]
    assert first.subject == "int4/fast" and "pins int4-g64" in first.because and "kl 0.3 nats is above" in first.because
    assert (first.numbers["kl_nats"], first.numbers["max_kl_nats"], first.numbers["scored_kl_nats"]) == (0.3, 0.05, 0.3)
    assert {it.because for it in choice.decisions[1:]} == {"the profile pins int4-g64"}


def test_choose_prefers_accuracy_among_pinned_ones_that_break_the_limit_alike_fast() -> None:
    mended = replace(INT4, label="int4-mended/fast", kl_nats=0.15, time_per_token_ms=3.05)
    choice = choose([BASE, INT4, mended], max_kl_nats=0.05, pinned="int4-g64")
    # accuracy counts up to the worst KL: 0.2 x (1 - 0.15 / 0.3) against 0, speed 0.5 x 0.005
    assert choice.chosen == "int4-mended/fast"
    assert choice.scores["int4-mended/fast"] - choice.scores["int4/fast"] == pytest.approx(0.1 - 0.5 * 0.005)


def test_choose_prefers_a_feasible_pinned_candidate_to_a_better_scored_one() -> None:
    slow = replace(INT4, label="int4/slow", kl_nats=0.04, time_per_token_ms=9.9, infeasible_because=None)
    choice = choose([BASE, INT4, slow], max_kl_nats=0.05, pinned="int4-g64")
    assert (choice.chosen, choice.fallback) == ("int4/slow", None)


def test_choose_refuses_a_pinned_precision_of_which_nothing_was_built() -> None:
    with pytest.raises(UnsupportedError, match="pins int4-g64, of which no candidate could be built"):
        choose([BASE, SLOW], max_kl_nats=0.05, pinned="int4-g64")
