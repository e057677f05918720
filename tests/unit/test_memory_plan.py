"""Pages from memory, demand and page size, worked by hand; a plan that holds no request is refused."""

import pytest
from test_memory_budget import FACTS

from model_optimizer.errors import UnsupportedError
from model_optimizer.memory.budget import PROCESS_BYTES, RUNTIME_CONTEXT_BYTES, activation_bytes
from model_optimizer.memory.config import MemoryConfig
from model_optimizer.memory.plan import Available, Demand, capacity_requests, default_kv_plan, make_kv_plan, usable_bytes
from model_optimizer.spec import Lengths, Sla, Traffic

TRAFFIC = Traffic(prompt_tokens=Lengths(p50=10, p95=100, max=200), output_tokens=Lengths(p50=5, p95=60, max=90))
GIB = 2**30
FIXED = 4_000_000 + activation_bytes(FACTS, 100, 4) + RUNTIME_CONTEXT_BYTES + PROCESS_BYTES
"""Bytes of everything but the cache for 4 streams."""


def demand(**sla: float) -> Demand:
    return Demand(Sla.model_validate({"concurrency": 4, "max_model_len": 256} | sla), TRAFFIC, MemoryConfig())


def free_for(kv_bytes: int) -> int:
    """Return the free memory of which 0.9 x 0.9 covers everything else and `kv_bytes`."""
    return int((FIXED + kv_bytes) / 0.81) + 10


def test_make_kv_plan_reserves_every_stream_at_full_length_when_memory_allows() -> None:
    plan, budget = make_kv_plan(FACTS, demand(), Available(8 * GIB, 4_000_000))
    assert (plan.num_pages, plan.page_tokens, plan.max_batch, plan.max_model_len) == (4 * 16, 16, 4, 256)
    assert plan.capacity_tokens == 1024
    assert budget.kv_bytes == 1024 * 512
    assert budget.usable_bytes == int(0.9 * 8 * GIB)


def test_make_kv_plan_takes_what_fits_when_memory_is_short() -> None:
    # 25 pages of 16 x 512 B; a p95 request of 160 tokens takes 10 of them, so 2 run at once
    plan, _ = make_kv_plan(FACTS, demand(), Available(free_for(25 * 8192), 4_000_000))
    assert (plan.num_pages, plan.max_batch, plan.max_model_len) == (25, 2, 256)
    assert capacity_requests(plan, 160) == 2


def test_make_kv_plan_shortens_the_longest_request_to_what_the_pages_hold() -> None:
    plan, _ = make_kv_plan(FACTS, demand(), Available(free_for(12 * 8192), 4_000_000))
    assert (plan.num_pages, plan.max_batch, plan.max_model_len) == (12, 1, 192)


def test_make_kv_plan_stops_at_the_models_positions() -> None:
    plan, _ = make_kv_plan(FACTS, demand(max_model_len=4096), Available(8 * GIB, 4_000_000))
    assert (plan.max_model_len, plan.num_pages) == (512, 4 * 32)


def test_make_kv_plan_refuses_when_not_one_request_fits() -> None:
    with pytest.raises(
        UnsupportedError, match=r"one of 160 tokens needs 80 KiB of KV cache.*72\S* KiB are left.*raise sla.memory_gib"
    ):
        make_kv_plan(FACTS, demand(), Available(free_for(9 * 8192), 4_000_000))


def test_usable_bytes_is_the_lesser_of_free_memory_and_the_service_level() -> None:
    assert usable_bytes(Available(10 * GIB, 0), demand()) == 9 * GIB
    assert usable_bytes(Available(10 * GIB, 0), demand(memory_gib=2)) == 2 * GIB
    assert usable_bytes(Available(GIB, 0), demand(memory_gib=2)) == int(0.9 * GIB)


def test_make_kv_plan_keeps_the_whole_process_within_the_service_level() -> None:
    limit_gib = (FIXED + 30 * 8192) / 0.9 / GIB
    plan, budget = make_kv_plan(FACTS, demand(memory_gib=limit_gib), Available(64 * GIB, 4_000_000))
    assert plan.num_pages in (29, 30)
    assert budget.engine_bytes + PROCESS_BYTES <= 0.9 * limit_gib * GIB + 1


def test_default_kv_plan_gives_every_stream_its_full_length() -> None:
    plan = default_kv_plan(FACTS, Sla(concurrency=3, max_model_len=100))
    assert (plan.num_pages, plan.max_batch, plan.max_model_len, plan.bytes_per_token) == (3 * 7, 3, 100, 512)
