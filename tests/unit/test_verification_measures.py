"""Speed and resource measures from records whose times are given."""

from pathlib import Path

import numpy as np
import pytest

from model_optimizer.artifacts.compiled import CompiledModel, Engine, Parity
from model_optimizer.artifacts.measure import Measure, Origin, Verdict
from model_optimizer.artifacts.memory import KvPlan, MemoryPlan
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.measurement.load import LoadRecord
from model_optimizer.spec import Cost, Sla
from model_optimizer.verification.latency import BASELINE, CANDIDATE, LatencyRun, summarise
from model_optimizer.verification.resource import cost_measure, engine_measure, memory_measures
from model_optimizer.verification.speed import speed_measures

INT8 = WeightRecipe(method="rtn", formats=("int8-channel",))


def record(latencies_ms: np.ndarray, num_tokens: int = 4) -> LoadRecord:
    """One stream, requests back to back, tokens evenly spaced."""
    ends = np.cumsum(latencies_ms) * 1e6
    starts = np.r_[0, ends[:-1]]
    times = starts[:, None] + (ends - starts)[:, None] * np.arange(1, num_tokens + 1) / num_tokens
    count = len(latencies_ms)
    return LoadRecord(
        concurrency=1,
        submitted_ns=starts.astype(np.int64),
        first_token_ns=times[:, 0].astype(np.int64),
        finished_ns=ends.astype(np.int64),
        num_tokens=np.full(count, num_tokens),
        offsets=np.arange(0, num_tokens * count + 1, num_tokens),
        token_times_ns=times.ravel().astype(np.int64),
        tokens=np.zeros(num_tokens * count, np.int64),
        log_probs=np.zeros(num_tokens * count, np.float32),
        failed=np.zeros(count, bool),
    )


def run_of(candidate_ms: float, baseline_ms: float) -> LatencyRun:
    """Six rounds of twelve requests that scatter by 10 %."""
    generator = np.random.default_rng(0)
    rounds = {
        name: tuple(record(mean_ms * generator.uniform(0.9, 1.1, 12)) for _ in range(6))
        for name, mean_ms in ((CANDIDATE, candidate_ms), (BASELINE, baseline_ms))
    }
    return LatencyRun({}, rounds, seed=0)


def measures(run: LatencyRun, sla: Sla, labels: tuple[str, str] = ("int8/x", "float32/x")) -> dict[str, Measure]:
    results = (summarise(run, CANDIDATE, labels[0]), summarise(run, BASELINE, labels[1]))
    return {measure.name: measure for measure in speed_measures(run, results, sla, alpha=0.05)}


def test_speed_measures_have_the_values_of_the_records() -> None:
    found = measures(run_of(100.0, 200.0), Sla())
    assert found["speed_ratio"].value == pytest.approx(2.0, rel=0.05)
    assert found["throughput"].value == pytest.approx(40.0, rel=0.02) and found["throughput"].baseline == pytest.approx(
        20, rel=0.02
    )
    assert 97 < found["p50_latency"].value < 103 and 105 < found["p95_latency"].value < 110
    assert found["p50_ttft"].value == pytest.approx(found["p50_latency"].value / 4)
    assert found["p95_itl"].value == pytest.approx(found["p95_latency"].value / 4, rel=0.03)
    assert found["jitter"].value == pytest.approx(found["p99_latency"].value - found["p50_latency"].value)
    assert found["p95_latency"].metric == "speed/p95_latency_ms"


@pytest.mark.parametrize(
    ("candidate_ms", "verdict"),
    [(50.0, Verdict.ACCEPT), (100.0, Verdict.ACCEPT), (120.0, Verdict.REJECT), (105.0, Verdict.INCONCLUSIVE)],
)
def test_speed_ratio_gates_when_the_service_level_states_no_speed(candidate_ms: float, verdict: Verdict) -> None:
    found = measures(run_of(candidate_ms, 100.0), Sla())
    assert found["speed_ratio"].verdict is verdict
    assert all(measure.verdict is None for name, measure in found.items() if name != "speed_ratio")


def test_limits_of_the_service_level_gate_instead_of_the_ratio() -> None:
    sla = Sla(p50_latency_ms=110, p95_latency_ms=120, p99_latency_ms=130, throughput_tok_per_s=30)
    found = measures(run_of(100.0, 50.0), sla)
    assert found["p50_latency"].verdict is Verdict.ACCEPT
    assert found["p95_latency"].verdict is Verdict.ACCEPT
    assert measures(run_of(100.0, 50.0), Sla(p95_latency_ms=90))["p95_latency"].verdict is Verdict.REJECT
    assert found["p99_latency"].verdict is None and found["p99_latency"].limit == 130
    assert found["throughput"].verdict is Verdict.ACCEPT
    assert found["speed_ratio"].verdict is None


def test_speed_ratio_of_the_baseline_itself_is_accepted() -> None:
    found = measures(run_of(120.0, 100.0), Sla(), labels=("float32/x", "float32/x"))
    assert found["speed_ratio"].verdict is Verdict.ACCEPT and "noise" in found["speed_ratio"].reason


def compiled(recipe: WeightRecipe, num_bytes: int) -> CompiledModel:
    parity = Parity(
        max_abs_logit_difference=0, mean_kl_nats=0, top1_agreement_ratio=1, greedy_tokens_equal=True,
        num_tokens=1, tolerance_kl_nats=1, passed=True,
    )  # fmt: skip
    engine = Engine(runtime="torch", directory="e", num_bytes=num_bytes, framework_version="1")
    return CompiledModel(
        strategy=Strategy(weights=recipe, runtime="torch"), engine=engine, parity=parity,
        level=0, layout="l", reproduce=None, build_s=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "num_bytes", "verdict"),
    [(INT8, 400, Verdict.ACCEPT), (INT8, 1001, Verdict.REJECT), (WeightRecipe(), 1001, None)],
)
def test_engine_measure_compares_with_the_baseline(recipe: WeightRecipe, num_bytes: int, verdict: Verdict | None) -> None:
    found = engine_measure(compiled(recipe, num_bytes), compiled(WeightRecipe(), 1000))
    assert (found.value, found.baseline, found.verdict) == (num_bytes, 1000, verdict)
    assert found.metric == "resource/engine_bytes"


@pytest.mark.parametrize(
    ("memory_gib", "ran", "verdicts"),
    [(None, 4, (None, Verdict.ACCEPT)), (1, 4, (Verdict.ACCEPT, Verdict.ACCEPT)), (0.4, 3, (Verdict.REJECT, Verdict.REJECT))],
)
def test_memory_measures_gate_peak_and_concurrency(
    memory_gib: float | None, ran: int, verdicts: tuple[Verdict | None, Verdict], tmp_path: Path
) -> None:
    kv = KvPlan(page_tokens=16, num_pages=4, bytes_per_token=1, max_batch=4, max_model_len=16)
    plan = MemoryPlan(
        kv=kv, budget=(), planned_concurrency=4, capacity_requests=8, ran_concurrency=ran,
        predicted_peak_bytes=2**29, measured_peak_bytes=2**29, config="c",
    )  # fmt: skip
    assert tuple(measure.verdict for measure in memory_measures(plan, Sla(memory_gib=memory_gib))) == verdicts


def test_cost_is_price_over_rate_and_predicted() -> None:
    run = run_of(100.0, 200.0)  # 10 requests per second
    found = cost_measure(run, Sla(cost_usd_per_1k_requests=1), Cost(machine_usd_per_hour=3.6), 0.05)
    assert found.value == pytest.approx(0.1, rel=0.02) and found.baseline == pytest.approx(0.2, rel=0.02)
    assert found.origin is Origin.PREDICTED and found.verdict is Verdict.ACCEPT
    assert found.interval is not None and found.interval.lower < found.value < found.interval.upper
    without = cost_measure(run, Sla(), Cost(), 0.05)
    assert without.value is None and without.verdict is None and "no price" in without.reason
