"""Two reports side by side: what differs, by how much, whether it can be told from noise, and whether it may be compared."""

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from report_fixtures import INT8, compiled, results
from reporting_fixtures import accepted_after_repair, make_report, replaced

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.compare import Pair, compare_reports, gate_cells, pair_cells
from model_optimizer.reporting.compare_page import fronts_picture, render_comparison


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


@pytest.mark.parametrize(
    ("left", "right", "lower", "upper"),
    [
        (
            (100.0, 80.0, 120.0),
            (50.0, 20.0, 80.0),
            -50 - math.hypot(30, 20),
            -50 + math.hypot(30, 20),
        ),  # half-widths add in squares
        ((100.0, 97.0, 120.0), (200.0, 160.0, 209.0), 100 - math.hypot(40, 20), 100 + math.hypot(9, 3)),
    ],
)
def test_pair_difference_interval_joins_two_independent_intervals(
    left: tuple[float, float, float], right: tuple[float, float, float], lower: float, upper: float
) -> None:
    found = Pair(latency(*left), latency(*right)).difference_interval
    assert found is not None and (found.lower, found.upper) == pytest.approx((lower, upper))


def test_pair_difference_interval_of_normal_means_covers_the_true_difference() -> None:
    # two means of 25 draws each, known spread 1: the interval must hold the true difference 0.3 in 95 % of 4,000 pairs
    generator = np.random.default_rng(7)
    half = 1.959964 / 5
    means = generator.normal([0.0, 0.3], 0.2, (4000, 2))
    pairs = [Pair(latency(a, a - half, a + half), latency(b, b - half, b + half)).difference_interval for a, b in means.tolist()]
    covered = sum(it is not None and it.lower <= 0.3 <= it.upper for it in pairs) / len(pairs)
    assert covered == pytest.approx(0.95, abs=0.011)  # three standard errors


def test_pair_difference_interval_is_none_where_levels_differ() -> None:
    wide = latency(100, 80, 120).model_copy(update={"interval": Interval(lower=80, upper=120, level=0.99)})
    assert Pair(latency(100, 80, 120), wide).difference_interval is None


def test_compare_reports_lists_every_gate_of_either_run() -> None:
    left, right = make_report(Verdict.REJECT), accepted_after_repair()
    gates = compare_reports(left, right).gates
    expected = {(it.dimension, it.name) for report in (left, right) for it in report.measures if it.verdict is not None}
    assert {(gate.dimension, gate.name) for gate in gates} == expected
    cells = {gate.name: gate_cells(gate) for gate in gates}
    name, mine, other, change, interval = cells["everyday_facts_difference"]
    assert name.startswith("everyday facts difference (≥ −") and mine.endswith("REJECT") and other.endswith("ACCEPT")
    assert change == "+0.041" and interval.count(" to ") == 1


def test_compare_reports_of_one_machine_and_one_golden_set_has_no_doubt() -> None:
    assert compare_reports(make_report(), make_report(Verdict.REJECT)).warnings == ()


def test_compare_reports_doubts_what_may_not_be_compared() -> None:
    report = make_report()
    device = report.target.device.model_copy(update={"name": "another CPU"})
    rows = tuple(row.model_copy(update={"num_items": row.num_items + 1}) for row in report.verification.golden)
    other = report.model_copy(
        update={
            "target": report.target.model_copy(update={"device": device}),
            "verification": report.verification.model_copy(update={"golden": rows}),
            "versions": {**report.versions, "torch": "9.9"},
            "model_ref": "another/model",
        }
    )
    comparison = compare_reports(report, other)
    assert [line.partition(" (")[0] for line in comparison.warnings[:3]] == [
        "other models",
        "other golden sets",
        "other machines",
    ]
    assert any("another CPU" in line for line in comparison.warnings)
    assert any("versions of torch" in line for line in comparison.warnings)
    differing = {fact.name for fact in comparison.environment if not fact.same}
    assert {"device", "golden sets", "torch"} <= differing


def test_compare_reports_names_differences_of_strategy() -> None:
    facts = {fact.name: fact for fact in compare_reports(accepted_after_repair(), make_report()).strategy}
    assert (facts["repairs"].left, facts["repairs"].right) == ("2", "0")
    assert not facts["formats"].same and facts["runtime"].same


def test_render_comparison_is_one_page_that_asks_for_nothing_and_escapes_names() -> None:
    reports = (make_report(), accepted_after_repair())
    page = render_comparison(compare_reports(*reports), reports, ("<b>one</b>", "two & three")).decode()
    assert "<b>one</b>" not in page and "&lt;b&gt;one&lt;/b&gt; and two &amp; three" in page
    assert "default-src 'none'" in page and "<script" not in page and "src=" not in page and "href=" not in page
    assert page.count("<svg") == 1


def test_fronts_picture_shows_every_measured_candidate_of_both_runs() -> None:
    reports = (make_report(), accepted_after_repair())
    picture = ElementTree.fromstring(fronts_picture(reports, ("one", "two")))
    hints = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")][1:]
    measured = [sum(bool(it.measures) for it in report.front.candidates) for report in reports]
    assert [sum(hint.startswith(f"{name}: ") for hint in hints) for name in ("one", "two")] == measured
