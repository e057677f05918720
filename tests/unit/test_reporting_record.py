"""What a run leaves in MLflow and Prefect for people who compare runs."""

from report_fixtures import FLOAT, INT8, quantized, results, stored
from reporting_fixtures import accepted_after_repair, make_report

from model_optimizer.artifacts.measure import Dimension, Measure, Origin, Verdict
from tasks.facts import candidate_table, gate_metrics, headline_metrics, outcome_params
from tasks.record import explain


def test_headline_metrics_sort_before_every_other_metric() -> None:
    report = make_report()
    headline, gates = headline_metrics(report), gate_metrics(report)
    assert headline["Headline/generation_speed_ratio"] == 1.51
    assert headline["Headline/engine_bytes"] == 218_000_000
    assert max(headline) < min(gates)
    assert (gates["gate.accuracy"], gates["speed/p95_latency_ms"]) == (1.0, 1233)


def test_headline_metrics_leave_out_what_was_not_measured() -> None:
    assert "Headline/generation_speed_ratio" not in headline_metrics(accepted_after_repair())


def test_gate_metrics_are_zero_for_a_dimension_that_was_not_accepted() -> None:
    assert gate_metrics(make_report(Verdict.INCONCLUSIVE))["gate.accuracy"] == 0.0


def test_outcome_params_name_profile_strategy_and_verdicts() -> None:
    params = outcome_params("chat", accepted_after_repair())
    assert params["profile"] == "chat"
    assert params["strategy"] == "int4-g64-rtn-repair2/onnxruntime"
    assert (params["verdict"], params["verdict accuracy"], params["rounds"]) == ("ACCEPT", "ACCEPT", "3")


def test_candidate_table_puts_the_chosen_strategy_first_and_reads_well() -> None:
    rows = candidate_table(results().front)
    assert [row["status"] for row in rows][:2] == ["chosen", "baseline"]
    assert (rows[0]["strategy"], rows[0]["decoding"], rows[0]["engine"]) == (INT8.label, "40 tok/s", "218 MB")
    assert {row["strategy"]: row["figures"] for row in rows}["int8-channel-rtn/torch"] == "predicted"
    assert FLOAT.label in {row["strategy"] for row in rows}


def test_explain_shows_figures_with_units_and_escapes_what_others_wrote() -> None:
    size = Measure(name="weights", dimension=Dimension.RESOURCE, unit="bytes", value=218e6, baseline=436e6)
    missing = Measure(
        name="cost", dimension=Dimension.RESOURCE, unit="usd", value=None, origin=Origin.NOT_MEASURED, reason="no | price"
    )
    artifact = quantized().model_copy(update={"measures": (missing, size), "warnings": ("a <b> at -3",)})
    text = explain("quantize", {"chosen": stored("quantize", artifact, cached=True)})
    assert "found in the store, made at 2026-11-29 20:00:00 UTC in 12 s" in text
    assert "| weights | 218 MB | shown only | – | 436 MB | −50 % | – |  |" in text
    assert r"no \| price" in text and r"- **warning**: a \<b\> at −3" in text
    assert text.index("| weights ") < text.index("| cost ")
