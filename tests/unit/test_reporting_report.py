"""The report: what its headline claims, and that every rendering is complete, safe and readable."""

import re

import pytest
from report_fixtures import FLOAT, INT8, compiled, results
from reporting_fixtures import make_report, parse

from model_optimizer.artifacts.base import StageArtifact
from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Origin, Verdict
from model_optimizer.artifacts.report import Report, StageResults, worst
from model_optimizer.errors import ConfigError
from model_optimizer.reporting import text
from model_optimizer.reporting.formats.github import SUMMARY_LIMIT_BYTES, truncate
from model_optimizer.reporting.headline import headline_figures, headline_sentence
from model_optimizer.reporting.markup import cell, table
from model_optimizer.reporting.renderers import RENDERERS, render_documents
from model_optimizer.reporting.summary import COLUMNS, verdict_markdown, verdict_table
from model_optimizer.reporting.svg import Scale, ticks
from model_optimizer.reporting.tables import candidate_rows, measure_rows, not_measured

HOSTILE = "<script>alert(1)</script>|`*_[x](http://example.invalid)"


def test_headline_gives_size_and_speed_against_their_references() -> None:
    figures = make_report().figures
    assert figures.size_ratio == pytest.approx(218_000_000 / (2 * 134_515_008), rel=1e-12)
    assert (figures.speed_ratio, figures.speed_ratio_lower, figures.speed_ratio_upper) == (1.51, 1.43, 1.6)
    assert figures.accuracy_set == "everyday-facts"
    assert make_report().headline == (
        "int8-channel-rtn/onnxruntime generates 1.51× as many tokens per second (1.43 to 1.60) as float32/onnxruntime "
        "and takes 0.81× the size of"
        " 2 bytes per parameter (218 MB against 269 MB; the source file has 98 MB)."
    )


def test_headline_says_that_it_is_not_faster_and_why_it_was_chosen() -> None:
    headline = make_report(faster=False).headline
    assert "is not measurably faster than float32/onnxruntime, 0.93× (0.85 to 1.02)" in headline
    assert "none is faster than the baseline" in headline


def test_headline_says_slower_when_the_whole_interval_is_below_one() -> None:
    found = results()
    slow = [
        candidate.model_copy(update={"speed_ratio": 0.8, "speed_ratio_interval": Interval(lower=0.75, upper=0.85)})
        for candidate in found.front.candidates
    ]
    front = found.front.model_copy(update={"candidates": tuple(slow)})
    found = StageResults(found.target, front, found.quantized, found.compiled, found.memory, found.verification)
    assert "generates more slowly than float32/onnxruntime, 0.80× (0.75 to 0.85)" in headline_sentence(
        found, headline_figures(found, 1)
    )


def test_headline_says_that_it_is_not_smaller_and_why() -> None:
    found = results()
    big = StageResults(found.target, found.front, found.quantized, compiled(INT8, 300_000_000), found.memory, found.verification)
    sentence = headline_sentence(big, headline_figures(big, 98_000_000))
    assert "is not smaller than 2 bytes per parameter: 1.12×" in sentence
    assert "stays in float32" in sentence


def test_headline_of_the_baseline_claims_no_speed() -> None:
    found = results()
    front = found.front.model_copy(update={"choice": FLOAT})
    same = StageResults(found.target, front, found.quantized, compiled(FLOAT), found.memory, found.verification)
    assert "is itself the fastest unquantized candidate" in headline_sentence(same, headline_figures(same, 1))


@pytest.mark.parametrize(("verdict", "word"), [(Verdict.REJECT, "Rejected"), (Verdict.INCONCLUSIVE, "Not decided")])
def test_headline_opens_with_the_gate_that_was_not_accepted(verdict: Verdict, word: str) -> None:
    report = make_report(verdict)
    assert report.verdict is verdict
    assert report.headline.startswith(f"{word}: everyday facts difference −0.0")
    assert ("410 more samples needed" in report.headline) == (verdict is Verdict.INCONCLUSIVE)


def test_verdict_counts_a_failed_gate_of_any_stage() -> None:
    found = results()
    gate = Measure(name="coverage", dimension=Dimension.RESOURCE, unit="ratio", value=0.5, limit=0.9, verdict=Verdict.REJECT)
    quantized = found.quantized.model_copy(update={"measures": (gate,)})
    found = StageResults(found.target, found.front, quantized, found.compiled, found.memory, found.verification)
    assert found.verification.verdict is Verdict.ACCEPT
    assert found.verdict() is Verdict.REJECT
    assert found.dimensions()[Dimension.RESOURCE] is Verdict.REJECT
    assert found.dimensions()[Dimension.SPEED] is Verdict.ACCEPT


def test_worst_orders_verdicts() -> None:
    assert worst((Verdict.ACCEPT, Verdict.INCONCLUSIVE)) is Verdict.INCONCLUSIVE
    assert worst((Verdict.REJECT, Verdict.INCONCLUSIVE, Verdict.ACCEPT)) is Verdict.REJECT


def test_build_report_keeps_the_later_measure_of_one_name() -> None:
    found = results()
    early = Measure(name="p95_latency", dimension=Dimension.SPEED, unit="ms", value=1.0, origin=Origin.PREDICTED)
    target = found.target.model_copy(update={"measures": (early,)})
    found = StageResults(target, found.front, found.quantized, found.compiled, found.memory, found.verification)
    assert [measure.value for measure in found.measures() if measure.name == "p95_latency"] == [1233]


def test_build_report_keeps_every_warning_and_decision_in_order() -> None:
    report = make_report()
    assert report.warnings == ("verify: the soak lasted 60 s of the 86400 s that final sign-off needs",)
    assert [stage for stage, _ in report.decisions] == ["scan", "quantize", "memory"]
    assert [note.stage for note in report.stages] == ["profile", "scan", "quantize", "compile", "memory", "verify"]


def test_renderers_are_found_and_an_unknown_one_is_refused() -> None:
    assert RENDERERS.names() == ("github", "html", "json", "markdown")
    with pytest.raises(ConfigError, match="unknown report format"):
        RENDERERS.get("pdf")


def test_render_json_round_trips() -> None:
    report = make_report(Verdict.INCONCLUSIVE)
    assert Report.model_validate_json(render_documents(report)["report.json"]) == report


def test_renderings_show_every_measure_of_every_dimension() -> None:
    report = make_report(Verdict.REJECT)
    documents = render_documents(report)
    for measure in report.measures:
        for name in ("report.html", "report.md", "summary.md"):
            assert measure.name.replace("_", " ") in documents[name].decode()


def test_renderings_escape_hostile_text() -> None:
    found = results()
    plan = tuple(layer.model_copy(update={"layer": f"model.layers.0.{HOSTILE}"}) for layer in found.quantized.plan[:1])
    quantized = found.quantized.model_copy(update={"plan": plan, "warnings": (HOSTILE,)})
    report = make_report(
        found=StageResults(found.target, found.front, quantized, found.compiled, found.memory, found.verification), name=HOSTILE
    )
    documents = render_documents(report)
    assert b"<script" not in documents["report.html"]
    assert b"<script" not in documents["report.md"].replace(rb"\<script", b"")
    assert cell("a|b") == r"a\|b"
    rows = [line for line in documents["report.md"].decode().splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) >= 3 for line in rows)


def test_renderings_survive_a_run_that_measured_little() -> None:
    found = results()
    quantized = found.quantized.model_copy(update={"plan": ()})
    bare = [candidate.model_copy(update={"measures": ()}) for candidate in found.front.candidates]
    front = found.front.model_copy(update={"candidates": tuple(bare)})
    verification = found.verification.model_copy(update={"golden": (), "latency": (), "measures": ()})
    report = make_report(found=StageResults(found.target, front, quantized, found.compiled, found.memory, verification))
    page = parse(report)
    assert "no layer was quantized" in page.words
    assert report.figures.accuracy_set is None
    assert "no golden set gates" in render_documents(report)["report.md"].decode()


def test_measure_rows_put_gates_first_and_the_unmeasured_last() -> None:
    rows = measure_rows(make_report(), Dimension.SPEED)
    assert [row.name for row in rows] == ["p95 latency", "p50 latency", "generation speed ratio", "ttft model"]
    first = rows[0]
    assert (first.value, first.baseline, first.change) == ("1,233 ms", "1,850 ms", "−33 %")
    assert (first.interval, first.limit, first.note) == ("1,147 to 1,344 ms", "≤ 1,500 ms", "n\u00a0=\u00a040")
    assert measure_rows(make_report(), Dimension.RESOURCE)[-1].origin == "not measured"


def test_candidate_rows_name_a_status_for_each() -> None:
    rows = {row.label: row for row in candidate_rows(results().front, INT8)}
    assert rows["int8-channel-rtn/onnxruntime"].status == "chosen"
    assert rows["float32/torch"].note == "dominated by float32/onnxruntime"
    pruned = rows["int8-channel-rtn/torch"]
    assert (pruned.status, pruned.predicted, pruned.decode) == ("pruned", True, "15 tok/s")


def test_not_measured_gives_the_reason() -> None:
    assert not_measured(make_report()) == (("resource: energy per token", "this machine exposes no energy counter"),)


def test_verdict_table_has_one_row_per_gate_and_no_empty_dimension() -> None:
    summary = verdict_table(make_report(Verdict.INCONCLUSIVE))
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert [(row.dimension, row.measure) for row in summary.rows] == [
        ("accuracy", "everyday facts difference"),
        ("speed", "p95 latency"),
        ("resource", "peak memory"),
        ("robustness", "failed requests"),
    ]
    assert all(len(row.cells()) == len(COLUMNS) for row in summary.rows)
    assert "| ◐ INCONCLUSIVE |" in verdict_markdown(make_report(Verdict.INCONCLUSIVE))


def test_render_github_fits_the_limit() -> None:
    assert len(render_documents(make_report())["summary.md"]) < SUMMARY_LIMIT_BYTES


@pytest.mark.parametrize("limit", [400, 401, 402, 403])
def test_truncate_cuts_between_lines_and_says_so(limit: int) -> None:
    content = truncate("漢字 line\n" * 200, limit)
    assert len(content) <= limit
    body, _, notice = content.decode().partition("\n\n_")
    assert set(body.splitlines()) == {"漢字 line"} and notice.startswith("The rest is left out")
    assert truncate("short", limit) == b"short"


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (218_000_000, "bytes", "218 MB"),
        (2**31, "bytes", "2.15 GB"),
        (999, "bytes", "999 B"),
        (1.0042, "ratio", "1.004"),
        (-0.0061, "ratio", "−0.0061"),
        (61.04, "tok_per_s", "61 tok/s"),
        (0.0000025, "nats", "2.50e−06 nats"),
        (0, "count", "0"),
        (1233.4, "ms", "1,233 ms"),
        (None, "ms", "–"),
        (200, "s", "3 min 20 s"),
        (-1_200_000, "bytes_per_hour", "−1.2 MB/hour"),
        (14.237, "perplexity", "14.2"),
        (0.0213, "usd_per_1k_requests", "0.0213 USD per 1,000 requests"),
    ],
)
def test_quantity_reads_well(value: float | None, unit: str, expected: str) -> None:
    assert text.quantity(value, unit) == expected


def test_span_names_a_level_other_than_95() -> None:
    assert text.span(Interval(lower=-1, upper=2, level=0.9), "ms") == "−1 to 2 ms (90 %)"


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 58) == [0, 10, 20, 30, 40, 50]
    assert ticks(-0.031, 0.019) == [-0.03, -0.02, -0.01, 0, 0.01]


def test_scale_maps_ends_and_clamps() -> None:
    scale = Scale(0, 10, 100, 200)
    assert (scale(0), scale(5), scale(10), scale(50)) == (100, 150, 200, 200)


def test_table_escapes_cells() -> None:
    assert table(("a", "b"), [("x|y", "1\n2")]) == "| a | b |\n| --- | --- |\n| x\\|y | 1 2 |\n"


def test_warnings_hold_the_reason_of_a_skipped_stage() -> None:
    found = results()
    skipped = found.memory.model_copy(update={"skipped_because": "nothing to plan"})
    assert isinstance(skipped, StageArtifact)
    report = make_report(
        found=StageResults(found.target, found.front, found.quantized, found.compiled, skipped, found.verification)
    )
    assert "memory: skipped because nothing to plan" in report.warnings
