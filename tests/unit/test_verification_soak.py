"""Soak and latency on a real runtime, and on one that goes wrong in a known way."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.journal import Journal
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, Quiet, RequestId, TokenBatch, TokenEvent, TokenLogProbs
from model_optimizer.runtimes.registry import RUNTIMES, framework_version
from model_optimizer.spec import Lengths, Sla, Traffic
from model_optimizer.verification.config import SoakConfig, VerifyConfig
from model_optimizer.verification.held_out import Engines
from model_optimizer.verification.latency import BASELINE, CANDIDATE, plan_latency, run_latency, summarise
from model_optimizer.verification.soak import MIN_PHASES, Stress, run_soak
from model_optimizer.verification.soak_records import MemoryPoint, Segment
from model_optimizer.verification.soak_summary import summarise_soak

PLAN = KvPlan(page_tokens=16, num_pages=128, bytes_per_token=512, max_batch=4, max_model_len=128)
TRAFFIC = Traffic(prompt_tokens=Lengths(p50=8, p95=20, max=40), output_tokens=Lengths(p50=3, p95=6, max=8))
TEXT = tuple(range(4, 204))
STRESS = Stress(TRAFFIC, TEXT, concurrency=2, max_model_len=128, seed=0)
HOUR = SoakConfig(duration=3600.0, segment=3600.0, requests_per_segment=12)
"""An hour of traffic in one accelerated segment, the same steps every time."""


@pytest.fixture(scope="module")
def runtime(tiny_llama: Path) -> Iterator[LogitsRuntime]:
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version=framework_version("torch"))
    opened = RUNTIMES.get("torch").open(engine, tiny_llama, PLAN)
    yield opened
    opened.close()


class Faulty:
    """A real runtime whose events are spoiled from the `start`-th step on."""

    def __init__(self, inner: LogitsRuntime, start: int, **spoil: float):
        self.inner, self.left, self.spoil = inner, start, spoil
        self.facts = inner.facts

    def score(self, batch: TokenBatch) -> list[TokenLogProbs]:
        return self.inner.score(batch)

    def submit(self, request: GenerationRequest) -> RequestId:
        return self.inner.submit(request)

    def cancel(self, request: RequestId) -> None:
        self.inner.cancel(request)

    def step(self) -> list[TokenEvent]:
        self.left -= 1
        events = self.inner.step()
        return events if self.left > 0 else [replace(event, **self.spoil) for event in events]


def journal_at(path: Path) -> Journal[Segment]:
    return Journal(path / "soak.jsonl", "k", Segment)


def test_run_soak_finds_nothing_wrong_with_a_sound_runtime(tmp_path: Path, runtime: LogitsRuntime) -> None:
    start = time.monotonic()
    found = run_soak(runtime, STRESS, SoakConfig(duration=1.0, segment=0.5), journal_at(tmp_path), Quiet())
    assert 1.0 <= found.ran_s <= time.monotonic() - start
    assert (found.num_failed, found.num_non_finite, found.num_wrong_canaries) == (0, 0, 0)
    assert found.num_canaries == found.num_segments * 2 * 2 and found.num_requests > MIN_PHASES
    assert found.memory_slope_interval.lower <= found.memory_slope_bytes_per_hour <= found.memory_slope_interval.upper


def test_run_soak_sees_canaries_and_values_that_go_wrong(tmp_path: Path, runtime: LogitsRuntime) -> None:
    counted = Faulty(runtime, 10**9)
    found = run_soak(counted, STRESS, HOUR, journal_at(tmp_path / "sound"), Quiet())  # type: ignore[arg-type]
    assert found.num_wrong_canaries == found.num_non_finite == found.num_changed_digests == 0
    steps = 10**9 - counted.left
    spoiled = Faulty(runtime, steps - 3, token=7)  # the last steps are those of the last canaries
    found = run_soak(spoiled, STRESS, HOUR, journal_at(tmp_path / "tokens"), Quiet())  # type: ignore[arg-type]
    assert found.num_wrong_canaries == 2 and found.num_non_finite == 0
    spoiled = Faulty(runtime, steps - 3, log_prob=float("nan"))
    found = run_soak(spoiled, STRESS, HOUR, journal_at(tmp_path / "values"), Quiet())  # type: ignore[arg-type]
    assert found.num_non_finite > 0 and found.num_wrong_canaries == 0


def test_run_soak_continues_with_the_missing_time_and_counts_the_gap_as_not_tested(
    tmp_path: Path, runtime: LogitsRuntime
) -> None:
    first = run_soak(runtime, STRESS, SoakConfig(duration=0.4, segment=0.4), journal_at(tmp_path), Quiet())
    config = SoakConfig(duration=first.ran_s + 0.3, segment=0.4)
    with (tmp_path / "soak.jsonl").open("ab") as stream:
        stream.write(b'{"session": 0, "ran_s": 99')  # killed in the middle of the second segment
    found = run_soak(runtime, STRESS, config, journal_at(tmp_path), Quiet())
    assert found.num_sessions == 2 and found.num_segments in (2, 3)  # a segment may end a phase early: then a short one follows
    assert found.ran_s >= config.duration and found.num_requests > first.num_requests
    assert found.num_wrong_canaries == 0
    again = run_soak(runtime, STRESS, config, journal_at(tmp_path), Quiet())
    assert again == found  # nothing is left to run, and the same records give the same result


def test_run_soak_reports_requests_that_the_engine_refuses(tmp_path: Path, runtime: LogitsRuntime) -> None:
    stress = replace(
        STRESS, max_model_len=256, traffic=TRAFFIC.model_copy(update={"prompt_tokens": Lengths(p50=8, p95=20, max=200)})
    )
    found = run_soak(runtime, stress, SoakConfig(duration=0.3, segment=0.3), journal_at(tmp_path), Quiet())
    assert found.num_failed >= 1  # the length jump of 200 tokens into an engine of 128


def test_memory_slope_is_the_leak_that_was_put_in() -> None:
    points = [MemoryPoint(at_s=10.0 * n, rss_bytes=2**30 + 36_000 * n) for n in range(40)]
    burst = [MemoryPoint(at_s=10.0 * n, rss_bytes=n * 2**24) for n in range(10)]  # the warm-up of another, shorter session
    fields = {"ran_s": 100.0, "num_requests": 1, "num_failed": 0, "num_non_finite": 0, "num_tokens": 1, "canaries": ((), ())}
    records = [
        Segment.model_validate(fields | {"session": 0, "memory": burst, "end_to_end_ms": (1.0, 1.0, 5.0)}),
        Segment.model_validate(fields | {"session": 1, "memory": points, "end_to_end_ms": (2.0, 9.0, 9.0)}),
    ]
    found = summarise_soak(records, 200.0)
    assert found.memory_slope_bytes_per_hour == pytest.approx(36_000 * 360)
    assert (found.p50_first_ms, found.p50_last_ms) == (1.0, 9.0)


def test_run_latency_measures_both_engines_on_the_same_requests(runtime: LogitsRuntime) -> None:
    config = VerifyConfig(golden_sets=("x",), latency_requests=20)
    plan = plan_latency(config, Sla(concurrency=2, max_model_len=128), TRAFFIC, TEXT)
    assert (len(plan.rounds), plan.num_requests) == (5, 20)
    run = run_latency(Engines(runtime, runtime), plan, Quiet())
    one, two = run.joined(CANDIDATE), run.joined(BASELINE)
    assert one.num_tokens.tolist() == two.num_tokens.tolist() and one.tokens.tolist() == two.tokens.tolist()
    ratio = run.speed_ratio()
    assert ratio is not None and ratio.num_pairs == 5 and 0.1 < ratio.value < 10
    found = summarise(run, CANDIDATE, "float32/torch")
    assert found.num_requests == 20 and found.num_failed == 0
    assert found.percentiles_ms["p50"] == pytest.approx(np.median(one.end_to_end_ms()))
    assert "p50" in found.intervals_ms and "p95" not in found.intervals_ms


@pytest.mark.parametrize(("sla", "num_requests"), [(Sla(concurrency=2), 40), (Sla(concurrency=2, p95_latency_ms=9), 60)])
def test_plan_latency_takes_what_a_p95_limit_needs(sla: Sla, num_requests: int) -> None:
    plan = plan_latency(VerifyConfig(golden_sets=("x",)), sla, TRAFFIC, TEXT)
    assert plan.num_requests == num_requests


def test_plan_latency_fills_every_stream_twice_a_round() -> None:
    plan = plan_latency(VerifyConfig(golden_sets=("x",)), Sla(concurrency=16), TRAFFIC, TEXT)
    assert {len(block) for block in plan.rounds} == {32} and len(plan.rounds) == 5
