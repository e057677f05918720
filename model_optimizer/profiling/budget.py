"""Where the bytes go when the unquantized model serves the stated concurrency at full length."""

from model_optimizer.artifacts.target import BudgetLine
from model_optimizer.memory.budget import PROCESS_BYTES, RUNTIME_CONTEXT_BYTES, activation_bytes, binary_size
from model_optimizer.profiling.feasibility import Ask, kv_bytes

MARGIN_RATIO = 0.1
"""Of everything above it; what no estimate sees."""


def budget_lines(ask: Ask) -> tuple[BudgetLine, ...]:
    """Return weights, KV reservation, activations, runtime context, process and margin."""
    facts, sla = ask.model, ask.sla
    per_sequence = kv_bytes(facts, sla.max_model_len)
    prompt = min(ask.traffic.prompt_tokens.p95, sla.max_model_len)
    lines = (
        BudgetLine(
            part="weights",
            num_bytes=facts.num_parameters * ask.run_bits // 8,
            note=f"{facts.num_parameters:,} parameters at {ask.run_bits} bits, unquantized",
        ),
        BudgetLine(
            part="kv_reservation",
            num_bytes=sla.concurrency * per_sequence,
            note=f"{sla.concurrency} streams x {sla.max_model_len} tokens x {facts.kv_bytes_per_token:,} bytes, "
            f"{binary_size(per_sequence)} each",
        ),
        BudgetLine(
            part="activations",
            num_bytes=activation_bytes(facts, prompt, sla.concurrency) * ask.run_bits // 32,
            note=f"one prefill of {prompt} tokens beside {sla.concurrency} decoding streams, estimated",
        ),
        BudgetLine(part="runtime_context", num_bytes=RUNTIME_CONTEXT_BYTES, note="sessions and allocator slack"),
        BudgetLine(part="process", num_bytes=PROCESS_BYTES, note="interpreter and frameworks"),
    )
    margin = round(MARGIN_RATIO * sum(line.num_bytes for line in lines))
    return (*lines, BudgetLine(part="margin", num_bytes=margin, note=f"{MARGIN_RATIO:.0%} of the above"))


def total_bytes(lines: tuple[BudgetLine, ...]) -> int:
    return sum(line.num_bytes for line in lines)


def part_bytes(lines: tuple[BudgetLine, ...], part: str) -> int:
    return next(line.num_bytes for line in lines if line.part == part)
