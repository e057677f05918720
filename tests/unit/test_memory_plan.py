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


def test_make_kv_plan_counts_scales_of_an_8_bit_cache() -> None:
    config = MemoryConfig(kv_precision="int8")
    asked = Demand(Sla(concurrency=4, max_model_len=256), TRAFFIC, config)
    plan, budget = make_kv_plan(FACTS, asked, Available(8 * GIB, 4_000_000))
    # 2 layers of 2 heads of 16, keys and values: 128 bytes a token, 8 scales of 4 bytes a page
    assert (plan.bytes_per_token, plan.scale_bytes_per_page, plan.precision) == (128, 32, "int8")
    assert plan.pool_bytes == budget.kv_bytes == 64 * (16 * 128 + 32)


def test_available_bytes_beside_the_weights_lower_what_fits() -> None:
    free = free_for(25 * 8192)
    plan, budget = make_kv_plan(FACTS, demand(), Available(free, 4_000_000, workspace_bytes=5 * 8192))
    assert (plan.num_pages, budget.workspace_bytes) == (20, 5 * 8192)


@pytest.mark.parametrize("stated", ["auto", 8])
def test_memory_config_page_tokens_survives_being_written(stated: str | int) -> None:
    config = MemoryConfig.model_validate({"page_tokens": stated})
    assert config.model_dump()["page_tokens"] == stated
    assert MemoryConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("stated", [0, "none", True, 257])
def test_memory_config_refuses_page_tokens(stated: object) -> None:
    with pytest.raises(ValueError, match=r"1 to 256 tokens, or auto|less than or equal to 256"):
        MemoryConfig.model_validate({"page_tokens": stated})
