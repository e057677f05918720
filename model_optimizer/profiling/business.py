"""The business side: current state, target and acceptable cost per metric (A2); the three questions of the bottleneck (A1)."""

from model_optimizer.artifacts.target import BudgetLine, DecisionRow, Question
from model_optimizer.prediction.cost import usd_per_1k_requests
from model_optimizer.prediction.roofline import balanced_batch, decode_tok_per_s, decoder_cost, measured_rates
from model_optimizer.profiling.budget import part_bytes, total_bytes
from model_optimizer.profiling.current import current_state
from model_optimizer.profiling.feasibility import GIB, Ask, best_case, kv_bytes
from model_optimizer.spec import Cost


def decision_table(ask: Ask, budget: tuple[BudgetLine, ...], cost: Cost) -> tuple[DecisionRow, ...]:
    """Return latency, throughput, memory, accuracy and cost; `current` is predicted for the unquantized model."""
    now, sla = current_state(ask), ask.sla
    loss = f"at most {sla.accuracy_loss_ratio:g} of score lost"
    state = f"predicted, unquantized, {sla.concurrency} streams"
    return (
        DecisionRow(
            metric="p95 latency",
            current=f"{now.p95_latency_ms:,.0f} ms ({state})",
            target=_stated(sla.p95_latency_ms, "ms", "at most"),
            acceptable_cost=loss,
        ),
        DecisionRow(
            metric="throughput",
            current=f"{now.throughput_tok_per_s:.4g} tok/s ({state})",
            target=_stated(sla.throughput_tok_per_s, "tok/s", "at least"),
            acceptable_cost=f"{loss}; latency within its own target",
        ),
        DecisionRow(
            metric="memory",
            current=f"{total_bytes(budget) / GIB:.3g} GiB ({state} x {sla.max_model_len} tokens)",
            target=_stated(sla.memory_gib, "GiB", "at most"),
            acceptable_cost=f"{loss}; streams below {sla.concurrency} are not acceptable",
        ),
        DecisionRow(
            metric="accuracy",
            current="0 lost (it is the baseline)" + (f"; source on a {grid} grid" if (grid := ask.model.source_grid) else ""),
            target=loss,
            acceptable_cost="none: accuracy limits the others and is not traded",
        ),
        _cost_row(ask, cost, now.throughput_tok_per_s),
    )


def _cost_row(ask: Ask, cost: Cost, throughput_tok_per_s: float) -> DecisionRow:
    """Return the row of money; without a price nothing is claimed."""
    if cost.machine_usd_per_hour is None:
        current = "unknown: cost.machine_usd_per_hour is not stated"
    else:
        price = usd_per_1k_requests(cost.machine_usd_per_hour, throughput_tok_per_s, ask.traffic.output_tokens.p50)
        current = f"{price:.3g} USD per 1k requests of median length, machine always busy (predicted, unquantized)"
    return DecisionRow(
        metric="cost",
        current=current,
        target=_stated(ask.sla.cost_usd_per_1k_requests, "USD per 1k requests", "at most"),
        acceptable_cost="the time of this optimization run",
    )


def _stated(limit: float | None, unit: str, direction: str) -> str:
    return "not stated; shown, does not gate" if limit is None else f"{direction} {limit:g} {unit}"


def questions(ask: Ask, budget: tuple[BudgetLine, ...]) -> tuple[Question, ...]:
    """Return the three questions with answers from the numbers at hand."""
    return _loads_or_overflows(ask, budget), _latency_or_throughput(ask), _quality_floor(ask)


def _loads_or_overflows(ask: Ask, budget: tuple[BudgetLine, ...]) -> Question:
    """Does the model not load at all, or does it run out of memory under concurrency?"""
    limit = ask.device.memory_free_bytes
    if ask.sla.memory_gib is not None:
        limit = min(limit, round(ask.sla.memory_gib * GIB))
    kv, total = part_bytes(budget, "kv_reservation"), total_bytes(budget)
    per_stream = kv_bytes(ask.model, ask.sla.max_model_len)
    streams = max(0, (limit - (total - kv)) // per_stream)
    if total - kv > limit:
        answer = (
            "it does not load: weights and what runs them exceed the limit even without a cache; fewer weight bytes are needed"
        )
    elif total > limit:
        answer = f"it loads and overflows under concurrency: {streams} of {ask.sla.concurrency} streams fit at full length"
    else:
        answer = f"neither: {streams} streams of full length fit, {ask.sla.concurrency} are asked for"
    return Question(
        question="Can it not load, or does it run out of memory under concurrency?",
        answer=answer,
        numbers={
            "weights_gib": part_bytes(budget, "weights") / GIB,
            "kv_gib": kv / GIB,
            "total_gib": total / GIB,
            "limit_gib": limit / GIB,
            "streams_that_fit": float(streams),
        },
    )


def _latency_or_throughput(ask: Ask) -> Question:
    """Is it the latency of one request or the throughput of all that is short?"""
    now, sla = current_state(ask), ask.sla
    cost, rates = decoder_cost(ask.model, ask.run_bits), measured_rates(ask.device)
    batch = balanced_batch(cost, rates)
    slow = sla.p95_latency_ms is not None and now.p95_latency_ms > sla.p95_latency_ms
    few = sla.throughput_tok_per_s is not None and now.throughput_tok_per_s < sla.throughput_tok_per_s
    short = {
        (True, True): "both are short of target",
        (True, False): "latency is short of target",
        (False, True): "throughput is short of target",
        (False, False): "neither is short of a stated target by prediction",
    }[slow, few]
    bound = "weight bytes over memory bandwidth" if sla.concurrency < batch else "arithmetic"
    return Question(
        question="Is the latency of one request or the throughput of all the problem?",
        answer=f"{short}; at {sla.concurrency} streams the limit is {bound} (arithmetic takes over at a batch of {batch:.2g})",
        numbers={
            "step_alone_ms": 1000 * now.step_alone_s,
            "step_loaded_ms": 1000 * now.step_loaded_s,
            "alone_tok_per_s": decode_tok_per_s(cost, rates),
            "throughput_tok_per_s": now.throughput_tok_per_s,
            "best_case_tok_per_s": best_case(ask).throughput_tok_per_s,
            "p95_latency_ms": now.p95_latency_ms,
            "balanced_batch": batch,
        },
    )


def _quality_floor(ask: Ask) -> Question:
    """How much quality may be lost?"""
    loss, grid = ask.sla.accuracy_loss_ratio, ask.model.source_grid
    items = round(1 / loss)
    caveat = f"; the source already lies on a {grid} grid, so the floor is counted from there" if grid else ""
    return Question(
        question="What is the quality floor?",
        answer=f"the score may fall by {loss:g} absolute, one answer in {items}{caveat}",
        numbers={"accuracy_loss_ratio": loss, "items_per_lost_answer": float(items)},
    )
