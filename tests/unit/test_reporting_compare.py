"""Two reports side by side: what differs, by how much, and whether it can be told from noise."""

import pytest
from report_fixtures import INT8, compiled, results
from reporting_fixtures import accepted_after_repair, make_report, replaced

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.compare import Pair, compare_reports, pair_cells


def latency(value: float, lower: float, upper: float) -> Measure:
    interval = Interval(lower=lower, upper=upper)
    return Measure(name="p50_latency", dimension=Dimension.SPEED, unit="ms", value=value, interval=interval)


def with_measures(*measures: Measure) -> Report:
    found = results()
    return make_report(found=replaced(found, verification=found.verification.model_copy(update={"measures": measures})))


@pytest.mark.parametrize(
    ("right", "apart"), [((50.0, 40.0, 60.0), True), ((90.0, 60.0, 120.0), False), ((100.0, 90.0, 110.0), False)]
)
def test_pair_lies_apart_only_where_the_intervals_do_not_touch(right: tuple[float, float, float], apart: bool) -> None:
    pair = Pair(latency(100, 80, 120), latency(*right))
    assert pair.apart is apart
    assert pair.difference == right[0] - 100
    assert pair.ratio == right[0] / 100


def test_pair_cells_give_values_with_intervals_and_the_change() -> None:
    assert pair_cells(Pair(latency(100, 80, 120), latency(50, 40, 60))) == (
        "p50 latency", "100 ms (80 to 120 ms)", "50 ms (40 to 60 ms)", "−50 %", "yes",
    )  # fmt: skip


def test_pair_of_counts_is_subtracted_and_equal_ones_are_the_same() -> None:
    count = Measure(name="failed", dimension=Dimension.ROBUSTNESS, unit="count", value=0)
    more = count.model_copy(update={"value": 3.0})
    assert (Pair(count, more).ratio, Pair(count, more).change(), Pair(count, count).change()) == (None, "+3", "same")


def test_compare_reports_tells_what_stands_alone_from_what_is_against_a_baseline() -> None:
    comparison = compare_reports(make_report(), make_report(Verdict.INCONCLUSIVE))
    relative = {pair.left.name for pair in comparison.against_baselines()}
    assert relative == {"perplexity_ratio", "generation_speed_ratio", "engine_size_ratio"}
    absolute = [pair.left.name for pair in comparison.absolute()]
    assert absolute[0] == "everyday_facts_difference" and {"p95_latency", "peak_memory"} <= set(absolute)
    assert "energy_per_token" not in absolute


def test_compare_reports_opens_with_verdicts_and_strategies() -> None:
    facts = {fact.name: fact for fact in compare_reports(accepted_after_repair(), make_report(Verdict.REJECT)).facts}
    assert list(facts)[:5] == ["verdict", "accuracy", "speed", "resource", "robustness"]
    assert (facts["verdict"].left, facts["verdict"].right) == ("ACCEPT", "REJECT")
    assert facts["strategy"].left == "int4-g64-rtn-repair2/onnxruntime" and not facts["strategy"].same
    assert (facts["rounds"].left, facts["rounds"].right) == ("3", "1")
    assert facts["generation speed"].right == "1.51× baseline"
    assert facts["model"].same


def test_compare_reports_names_what_only_one_has() -> None:
    comparison = compare_reports(with_measures(latency(100, 80, 120)), with_measures())
    assert comparison.only_left == ("p50_latency",) and comparison.only_right == ()


def test_compare_reports_leaves_out_a_figure_whose_unit_changed() -> None:
    seconds = Measure(name="p50_latency", dimension=Dimension.SPEED, unit="s", value=0.1)
    comparison = compare_reports(with_measures(latency(100, 80, 120)), with_measures(seconds))
    assert "p50_latency" not in {pair.left.name for pair in comparison.pairs}


def test_compare_reports_of_one_run_with_itself_finds_no_difference() -> None:
    report = make_report(found=replaced(results(), compiled=compiled(INT8)))
    comparison = compare_reports(report, report)
    assert all(pair.difference == 0 for pair in comparison.pairs) and all(fact.same for fact in comparison.facts)
