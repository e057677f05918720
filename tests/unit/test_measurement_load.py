"""The closed loop on a real runtime."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError
from model_optimizer.measurement.load import LoadRecord, join, run_closed_loop
from model_optimizer.protocols import GenerationRequest, LogitsRuntime
from model_optimizer.runtimes.registry import RUNTIMES, framework_version

PLAN = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=512, max_batch=4, max_model_len=128)
REQUESTS = tuple(GenerationRequest(tuple(range(4, 10 + index)), 3 + index % 4) for index in range(9))


@pytest.fixture(scope="module")
def runtime(tiny_llama: Path) -> Iterator[LogitsRuntime]:
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version=framework_version("torch"))
    opened = RUNTIMES.get("torch").open(engine, tiny_llama, PLAN)
    yield opened
    opened.close()


def test_run_closed_loop_gives_every_request_its_tokens(runtime: LogitsRuntime) -> None:
    record = run_closed_loop(runtime, REQUESTS, 3)
    assert record.num_tokens.tolist() == [request.max_new_tokens for request in REQUESTS]
    assert record.num_failed == 0 and record.num_non_finite == 0
    assert record.offsets.tolist() == np.concatenate([[0], np.cumsum(record.num_tokens)]).tolist()
    alone = run_closed_loop(runtime, REQUESTS[4:5], 1)
    assert record.tokens_of(4) == alone.tokens_of(0)


def test_run_closed_loop_never_exceeds_the_concurrency(runtime: LogitsRuntime) -> None:
    record = run_closed_loop(runtime, REQUESTS, 3)
    edges = sorted([(t, 1) for t in record.submitted_ns] + [(t, -1) for t in record.finished_ns])
    in_flight = np.cumsum([step for _, step in edges])
    assert in_flight.max() == 3


def test_run_closed_loop_orders_times_within_every_request(runtime: LogitsRuntime) -> None:
    record = run_closed_loop(runtime, REQUESTS, 2)
    assert (record.submitted_ns < record.first_token_ns).all() and (record.first_token_ns <= record.finished_ns).all()
    assert record.itl_ms().size == record.num_tokens.sum() - record.num_requests
    assert (record.itl_ms() >= 0).all()
    np.testing.assert_allclose(record.end_to_end_ms().max() / 1e3, record.wall_s(), rtol=1)


def test_run_closed_loop_counts_a_refused_request_as_failed(runtime: LogitsRuntime) -> None:
    too_long = GenerationRequest(tuple(range(4, 124)), 100)
    record = run_closed_loop(runtime, (REQUESTS[0], too_long, REQUESTS[1]), 2)
    assert record.failed.tolist() == [False, True, False]
    assert record.end_to_end_ms().size == 2


def test_run_closed_loop_submits_nothing_after_the_deadline(runtime: LogitsRuntime) -> None:
    passed = run_closed_loop(runtime, REQUESTS, 2, deadline_ns=time.perf_counter_ns())
    assert passed.num_requests == 0 and passed.output_tok_per_s() == 0.0
    with pytest.raises(ConfigError, match="at least one request"):
        run_closed_loop(runtime, (), 2)


def record_of(submitted: list[int], tokens: list[list[int]]) -> LoadRecord:
    """Build a record from times in ms; an empty token list is a failure."""
    flat = [t for times in tokens for t in times]
    counts = np.array([len(times) for times in tokens])
    return LoadRecord(
        concurrency=2,
        submitted_ns=np.array(submitted, np.int64) * 1_000_000,
        first_token_ns=np.array([times[0] if times else -1 for times in tokens], np.int64) * 1_000_000,
        finished_ns=np.array([times[-1] * 1_000_000 if times else -1 for times in tokens], np.int64),
        num_tokens=counts.astype(np.int64),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        token_times_ns=np.array(flat, np.int64) * 1_000_000,
        tokens=np.zeros(len(flat), np.int64),
        log_probs=np.zeros(len(flat), np.float32),
        failed=np.array([not times for times in tokens]),
    )


def test_rates_are_the_ones_worked_out_by_hand() -> None:
    record = record_of([0, 0, 100], [[100, 200, 300], [], [500, 700]])
    assert record.output_tok_per_s() == pytest.approx(5 / 0.7)
    assert record.decode_tok_per_s() == pytest.approx(3 / 0.4)  # 2 tokens in 100..300, 1 in 500..700
    assert record.end_to_end_ms().tolist() == [300.0, 600.0]
    assert record.ttft_ms().tolist() == [100.0, 400.0]
    assert record.itl_ms().tolist() == [100.0, 100.0, 200.0]
    assert record.requests_per_s() == pytest.approx(2 / 0.7)


def test_join_keeps_requests_apart() -> None:
    first, second = record_of([0], [[100, 150]]), record_of([1000], [[1300, 1400, 1600]])
    both = join((first, second))
    assert both.offsets.tolist() == [0, 2, 5]
    assert both.itl_ms().tolist() == [50.0, 100.0, 200.0]
    assert both.end_to_end_ms().tolist() == [150.0, 600.0]
