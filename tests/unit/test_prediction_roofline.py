"""Roofline and cost arithmetic against hand-made numbers."""

import pytest
from profiling_fixtures import CPU, MODEL

from model_optimizer.prediction.cost import usd_per_1k_requests
from model_optimizer.prediction.roofline import (
    Rates,
    balanced_batch,
    best_case_cost,
    best_case_rates,
    decode_step_s,
    decode_tok_per_s,
    decoder_cost,
    measured_rates,
    prefill_s,
)

RATES = Rates(1e9, 1e11)


def test_decode_step_s_streams_weights_and_cache_when_memory_is_the_limit() -> None:
    cost = decoder_cost(MODEL, 32)
    assert cost.weight_bytes == 4_000_000  # 800,000 linear + 200,000 head, 4 bytes each
    assert decode_step_s(cost, RATES) == pytest.approx(4e-3)
    assert decode_step_s(cost, RATES, batch=4, context=100) == pytest.approx((4e6 + 4 * 100 * 800) / 1e9)


def test_decode_step_s_counts_operations_when_arithmetic_is_the_limit() -> None:
    step_s = decode_step_s(decoder_cost(MODEL, 32), Rates(1e12, 1e9), batch=4, context=100)
    assert step_s == pytest.approx(4 * (2_000_000 + 100 * 800) / 1e9)


def test_decode_tok_per_s_counts_all_streams() -> None:
    assert decode_tok_per_s(decoder_cost(MODEL, 32), RATES, batch=4) == pytest.approx(1000)


def test_balanced_batch_is_where_both_limits_meet() -> None:
    cost = decoder_cost(MODEL, 32)
    batch = balanced_batch(cost, RATES)
    assert batch == pytest.approx(4e-3 * 1e11 / 2e6)
    assert batch * cost.flop_per_token / RATES.flop_per_s == pytest.approx(RATES.read_s(cost.weight_bytes))


def test_prefill_s_needs_the_head_once() -> None:
    expected_flop = 1000 * 1_600_000 + 400_000 + 1000 * 1000 / 2 * 800
    assert prefill_s(decoder_cost(MODEL, 32), RATES, 1000) == pytest.approx(expected_flop / 1e11)
    assert prefill_s(decoder_cost(MODEL, 32), RATES, 1) == pytest.approx(4e-3)  # a single token is as slow as a decode step


def test_read_s_takes_what_fits_from_the_cache() -> None:
    rates = Rates(1e9, 1e11, cached_bytes=100_000, cached_read_bytes_per_s=4e9)
    assert rates.read_s(50_000) == pytest.approx(50_000 / 4e9)
    assert rates.read_s(300_000) == pytest.approx(100_000 / 4e9 + 200_000 / 1e9)


def test_best_case_is_never_worse_than_the_unquantized_model() -> None:
    best = decode_step_s(best_case_cost(MODEL), best_case_rates(CPU), batch=8, context=64)
    now = decode_step_s(decoder_cost(MODEL, 32), measured_rates(CPU), batch=8, context=64)
    assert best < now
    assert best_case_cost(MODEL).weight_bytes == 500_000


@pytest.mark.parametrize(("sets", "gain"), [((), 1), (("avx2",), 4), (("avx2", "avx512_vnni"), 4), (("avx2", "amx_int8"), 32)])
def test_best_case_rates_scale_with_the_integer_units(sets: tuple[str, ...], gain: int) -> None:
    assert best_case_rates(CPU.model_copy(update={"instruction_sets": sets})).flop_per_s == gain * 1e11


def test_usd_per_1k_requests_divides_price_by_throughput() -> None:
    assert usd_per_1k_requests(1.2, 600, 200) == pytest.approx(0.1111, abs=1e-4)
