"""From raw samples to the figures of `bench`, and to its page."""

from collections import Counter

import numpy as np
import pytest

from model_optimizer.measurement.bench_report import BenchReport, LoadResult, summarize
from model_optimizer.measurement.openloop import LoadRun
from model_optimizer.measurement.samples import LoadSamples, RequestStatus, ServiceLevel
from model_optimizer.measurement.self_watch import GeneratorHealth
from model_optimizer.reporting.bench_page import bench_page

MS = 1_000_000
HEALTH = GeneratorHealth(
    dispatch_delay_ms={"p50": 0.1}, loop_lag_ms={"p50": 0.1}, cpu_ratio=0.2, waited_ratio=0.0,
    num_waited_for_connection=0, limits=(), behind="",
)  # fmt: skip


def run_of(latency_ms: np.typing.NDArray[np.float64], failed: np.typing.NDArray[np.bool_]) -> LoadRun:
    """Requests due every 10 ms, each with two tokens in two chunks: halfway and at the end."""
    num = latency_ms.size
    due_ns = np.arange(num, dtype=np.int64) * 10 * MS
    ends_ns = due_ns + (latency_ms * MS).astype(np.int64)
    chunks_ns = np.stack([(due_ns + ends_ns) // 2, ends_ns], axis=1)
    samples = LoadSamples(
        intended_ns=due_ns,
        started_ns=due_ns,
        first_token_ns=chunks_ns[:, 0].copy(),
        finished_ns=ends_ns,
        num_tokens=np.full(num, 2, dtype=np.int64),
        offsets=np.arange(num + 1, dtype=np.int64) * 2,
        token_times_ns=chunks_ns.ravel(),
        chunk_tokens=np.ones(2 * num, dtype=np.int64),
        status=np.where(failed, RequestStatus.REJECTED, RequestStatus.OK).astype(np.int8),
    )
    reasons = Counter({"status 429": int(failed.sum())}) if failed.any() else Counter[str]()
    return LoadRun(samples, np.full(num, 7, dtype=np.int64), reasons, "", HEALTH, 2 * num, False)


def figure_values(load: LoadResult, name: str) -> dict[str, float | None]:
    figure = load.figure(name)
    assert figure is not None
    return {it.name: it.value for it in figure.percentiles}


def test_summarize_counts_failures_as_endless() -> None:
    latency_ms = np.linspace(100, 200, 1001)
    failed = np.zeros(1001, dtype=bool)
    failed[::50] = True  # 21 of 1001: above 1 %, below 5 %
    load = summarize(run_of(np.random.default_rng(0).permutation(latency_ms), failed), counted_by="the tokenizer", level=None)
    values = figure_values(load, "end_to_end")
    assert values["P99"] is None and values["P99.9"] is None  # a failed request stands there
    assert values["P50"] == pytest.approx(151, abs=2) and values["P95"] is not None and values["P95"] > 195
    assert load.num_failed == 21 and load.statuses == {"ok": 980, "rejected": 21} and load.failures == {"status 429": 21}
    ttft = load.figure("ttft")
    assert ttft is not None and ttft.num_samples == 980 and ttft.at(0.5) == pytest.approx(75, abs=1)
    assert load.output_tokens == 2 * 980 and load.prompt_tokens == 7 * 1001
    assert load.requests_per_s == pytest.approx(980 / load.wall_s)


def test_summarize_leaves_a_warm_up_out_and_shows_it() -> None:
    latency_ms = 100 + np.random.default_rng(1).normal(0, 2, 3000)
    latency_ms[:300] += np.linspace(400, 0, 300)
    load = summarize(run_of(latency_ms, np.zeros(3000, dtype=bool)), counted_by="", level=None)
    assert load.steady.steady and 200 <= load.steady.num_discarded <= 700
    assert load.steady.discarded_s == pytest.approx(load.steady.num_discarded * 0.01)
    tail = figure_values(load, "end_to_end")["P99.9"]
    assert tail is not None and tail < 130 and load.num_requests == 3000
    assert load.timeline[0][2] is not None and load.timeline[0][2] > 400  # the picture keeps the whole run
    assert load.output_tok_per_s is None and load.tokens_counted_by == "nobody"


def test_summarize_says_that_a_run_which_drifts_never_settled() -> None:
    load = summarize(run_of(np.linspace(100, 400, 2000), np.zeros(2000, dtype=bool)), counted_by="", level=None)
    assert load.unsteady and not load.steady.steady
    few = summarize(run_of(np.linspace(100, 400, 50), np.zeros(50, dtype=bool)), counted_by="", level=None)
    assert not few.unsteady and "50 samples are too few to tell" in few.steady.reason


def test_summarize_gives_goodput_within_the_service_level() -> None:
    level = ServiceLevel(end_to_end_ms=150.0)
    load = summarize(run_of(np.tile([100.0, 200.0], 200), np.zeros(400, dtype=bool)), counted_by="", level=level)
    assert load.goodput is not None and load.goodput.ratio == 0.5 and load.goodput.level == {"end_to_end_ms": 150.0}


def test_summarize_survives_a_run_in_which_all_failed() -> None:
    load = summarize(run_of(np.full(30, 5.0), np.ones(30, dtype=bool)), counted_by="", level=None)
    assert load.num_failed == 30 and figure_values(load, "end_to_end")["P50"] is None and load.requests_per_s == 0


def test_bench_page_escapes_what_a_server_says() -> None:
    load = summarize(run_of(np.full(300, 50.0), np.zeros(300, dtype=bool)), counted_by="", level=None)
    load = load.model_copy(update={"first_fault": "<script>alert(1)</script>", "failures": {"<b>": 1}})
    report = BenchReport(
        target="http://x/<i>", model="<img src=x>", endpoint="chat", stream=True, arrivals="a", lengths="l", seed=0,
        started_at="2026-01-01T00:00:00", version="0", machine="m", load=load,
    )  # fmt: skip
    page = bench_page(report)
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page and page.startswith("<!doctype html>")
