"""What the unquantized model is predicted to do here: the state that every target is compared with."""

from dataclasses import dataclass

from model_optimizer.prediction.roofline import decode_step_s, decoder_cost, measured_rates, prefill_s
from model_optimizer.profiling.feasibility import Ask


@dataclass(frozen=True, slots=True)
class Current:
    """Predicted by the roofline at measured rates; a real runtime is slower by its overhead."""

    step_alone_s: float
    step_loaded_s: float
    """With `concurrency` streams of median context."""
    throughput_tok_per_s: float
    ttft_ms: float
    """A p50 prompt, alone."""
    p50_latency_ms: float
    p95_latency_ms: float
    """p95 prompt and output at `concurrency`, prompts of the other streams not counted."""


def current_state(ask: Ask) -> Current:
    """Predict the unquantized model."""
    cost, rates = decoder_cost(ask.model, ask.run_bits), measured_rates(ask.device)
    prompt, output, longest = ask.traffic.prompt_tokens, ask.traffic.output_tokens, ask.sla.max_model_len
    context = min(prompt.p50 + output.p50 / 2, longest)
    step_s = decode_step_s(cost, rates, batch=ask.sla.concurrency, context=context)
    p95_prompt, p50_prompt = min(prompt.p95, longest), min(prompt.p50, longest)
    return Current(
        step_alone_s=decode_step_s(cost, rates, context=context),
        step_loaded_s=step_s,
        throughput_tok_per_s=ask.sla.concurrency / step_s,
        ttft_ms=1000 * prefill_s(cost, rates, p50_prompt),
        p50_latency_ms=1000 * (prefill_s(cost, rates, p50_prompt) + min(output.p50, longest) * step_s),
        p95_latency_ms=1000 * (prefill_s(cost, rates, p95_prompt) + min(output.p95, longest) * step_s),
    )
