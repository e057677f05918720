"""The repair rounds in every form of the report, and what a report says of a candidate that was never timed."""

import dataclasses

import pytest
from report_fixtures import FLOAT, INT4, compiled, results, stored
from reporting_fixtures import accepted_after_repair, make_report, parse, rejected_after_repair, repair_rounds, repaired, replaced

from model_optimizer.artifacts.measure import Interval, Measure, Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.build import RunFacts, StoredStages, build_report
from model_optimizer.reporting.headline import headline_figures, speed_ratio
from model_optimizer.reporting.renderers import render_documents
from model_optimizer.reporting.rounds import round_rows, rounds_picture
from model_optimizer.reporting.sentences import latency_sentence, soak_sentence
from model_optimizer.reporting.summary import verdict_markdown, verdict_table
from model_optimizer.reporting.tables import candidate_status


def test_round_rows_give_every_figure_of_a_round() -> None:
    rows = round_rows(accepted_after_repair())
    assert [row.verdict for row in rows] == [Verdict.REJECT, Verdict.REJECT, Verdict.ACCEPT]
    assert rows[1].cells == (
        "1", "int4-g64-rtn-repair1/onnxruntime", "23 layers raised: the gate lay −0.041 beyond its margin",
        "5.05", "0.023 nats", "–", "−0.026", "−0.038 to −0.014", "−0.02", "640",
    )  # fmt: skip
    assert rows[1].raised[0] == ("model.layers.0.mlp.down_proj", "int4-g64", "int8-channel", "0.004 nats", "2.00e−05 nats")
    assert rows[2].summary == "1 layer raised; its predicted KL falls from 0.0003 nats to 0 nats"
    assert (len(rows[1].parts[0]), len(rows[1].parts[1]), rows[2].parts[1]) == (4, 19, ())


def test_rounds_picture_puts_margin_and_difference_on_one_scale() -> None:
    picture = rounds_picture(accepted_after_repair())
    assert picture.count('class="rule"') == 3
    assert [picture.count(f"fill-{word}") for word in ("reject", "accept", "inconclusive")] == [2, 1, 0]
    assert "round 1, int4-g64-rtn-repair1/onnxruntime: −0.026 (−0.038 to −0.014) against margin −0.02, REJECT" in picture


@pytest.mark.parametrize("name", ["report.html", "report.md", "summary.md"])
def test_renderings_show_rounds_only_where_there_were_several(name: str) -> None:
    several = render_documents(accepted_after_repair())[name].decode()
    single = render_documents(make_report(rounds=repair_rounds()[:1]))[name].decode()
    for text in ("int4-g64-rtn-repair1/onnxruntime", "23 layers raised; their predicted KL falls", "19 more layers"):
        plain = several.replace("\\", "")
        assert text in plain and text not in single
    assert 'id="rounds"' not in single and "## Rounds" not in single


def test_render_html_folds_long_lists_of_raised_layers() -> None:
    page = parse(rejected_after_repair())
    assert "116 more layers of round 1" in " ".join(page.words)
    assert page.open == []


def test_verdict_says_how_many_rounds_it_took() -> None:
    assert verdict_table(accepted_after_repair()).title == "chat: ACCEPT after 3 rounds"
    assert verdict_table(make_report()).title == "chat: ACCEPT"
    assert verdict_markdown(rejected_after_repair()).startswith("## ✘ REJECT: repair after 4 rounds")


def test_headline_is_about_the_released_strategy_and_not_about_the_scans_choice() -> None:
    report = accepted_after_repair()
    assert report.headline.startswith("int4-g64-rtn-repair2/onnxruntime was not timed against float32/onnxruntime")
    statuses = {
        row.strategy.label: candidate_status(report.front, report.compiled.strategy, row) for row in report.front.candidates
    }
    assert statuses["int8-channel-rtn/onnxruntime"] == "first choice"
    assert "chosen" not in statuses.values()


def test_speed_ratio_comes_from_verification_where_the_scan_did_not_run_the_strategy() -> None:
    found = replaced(results(), compiled=compiled(repaired(INT4, 1)))
    served = Measure(
        name="speed_ratio", dimension="speed", unit="ratio", value=1.31, baseline=1.0, interval=Interval(lower=1.2, upper=1.4)
    )
    verification = found.verification.model_copy(update={"measures": (*found.verification.measures, served)})
    found = replaced(found, verification=verification)
    assert speed_ratio(found)[:2] == (1.31, Interval(lower=1.2, upper=1.4))
    assert headline_figures(found, 1).speed_ratio == 1.31
    assert speed_ratio(results())[0] == 1.51


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_renderings_say_why_a_rejected_candidate_was_neither_timed_nor_soaked(name: str) -> None:
    report = rejected_after_repair()
    assert latency_sentence(report) == "Neither engine was timed: accuracy was rejected."
    assert soak_sentence(report) == "The soak did not run: accuracy was rejected."
    text = render_documents(report)[name].decode()
    assert latency_sentence(report) in text and soak_sentence(report) in text
    assert "Throughput and percentiles" not in text and "| p50 |" not in text
    assert "0 failed, 0 non-finite" not in text


def cached_report(cached: bool) -> Report:
    found = results()
    stages = StoredStages(
        *(
            stored(name, artifact, cached=cached)
            for name, artifact in zip(
                ("profile", "scan", "quantize", "compile", "memory", "verify"),
                (getattr(found, field.name) for field in dataclasses.fields(found)),
                strict=True,
            )
        )
    )
    return build_report(RunFacts("chat", "package:tiny", 1, {}, {}), stages)


def test_report_is_the_same_whether_stages_came_from_the_store() -> None:
    assert render_documents(cached_report(True)) == render_documents(cached_report(False))


def test_report_of_the_baseline_says_that_no_speed_is_gained() -> None:
    found = results()
    found = replaced(found, front=found.front.model_copy(update={"choice": FLOAT}), compiled=compiled(FLOAT))
    assert "is itself the fastest unquantized candidate, so no speed is gained" in make_report(found=found).headline
