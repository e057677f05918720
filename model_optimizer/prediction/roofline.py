"""How fast a decoder can be at best: bytes over bandwidth or operations over rate, whichever takes longer.

Pure arithmetic, in seconds; knows no runtime. Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from dataclasses import dataclass

from model_optimizer.artifacts.target import DeviceFacts, ModelFacts

BEST_WEIGHT_BITS = 4
"""The fewest bits per weight that this program stores, without scales."""
INT8_OVER_FLOAT32 = {"amx_int8": 32, "avx512_vnni": 4, "avx_vnni": 4, "avx2": 4, "asimddp": 4, "i8mm": 8}
"""Peak int8 operations per cycle over peak float32 ones. Source: Intel Optimization Reference Manual, chapters on VNNI (64
against 16 multiply-adds per 512-bit instruction) and AMX (1,024 against 32 per cycle); Arm ARM, SDOT and SMMLA."""
INT8_OVER_BFLOAT16_GPU = 4
"""Tensor cores: int8 has twice the bfloat16 rate, 4-bit formats four times. Source: NVIDIA H100 and Blackwell data sheets."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device can do; up to `cached_bytes` of what is read again in every step may come from its cache."""

    read_bytes_per_s: float
    flop_per_s: float
    cached_bytes: int = 0
    cached_read_bytes_per_s: float | None = None

    def read_s(self, num_bytes: float) -> float:
        """Return the shortest time in which `num_bytes` are read."""
        if self.cached_read_bytes_per_s is None:
            return num_bytes / self.read_bytes_per_s
        cached = min(num_bytes, self.cached_bytes)
        fastest = max(self.cached_read_bytes_per_s, self.read_bytes_per_s)
        return cached / fastest + (num_bytes - cached) / self.read_bytes_per_s


@dataclass(frozen=True, slots=True)
class DecoderCost:
    """What one token costs."""

    weight_bytes: float
    """Streamed once per step, whatever the batch: linears (visited experts) and head."""
    flop_per_token: float
    head_flop: float
    """The part of it that a prompt needs for its last token only."""
    flop_per_token_per_context: float
    kv_bytes_per_token: float


def decoder_cost(facts: ModelFacts, weight_bits: float) -> DecoderCost:
    """Return the cost of a model whose multiplied weights are stored in `weight_bits` each."""
    return DecoderCost(
        weight_bytes=facts.flop_per_token / 2 * weight_bits / 8,
        flop_per_token=facts.flop_per_token,
        head_flop=2 * facts.vocab_size * facts.hidden_size,
        flop_per_token_per_context=facts.flop_per_token_per_context,
        kv_bytes_per_token=facts.kv_bytes_per_token,
    )


def decode_step_s(cost: DecoderCost, rates: Rates, *, batch: int = 1, context: float = 0.0) -> float:
    """Return max((weights + batch x context x KV) / bandwidth, batch x FLOPs / rate), in seconds."""
    read = rates.read_s(cost.weight_bytes + batch * context * cost.kv_bytes_per_token)
    return max(read, batch * (cost.flop_per_token + context * cost.flop_per_token_per_context) / rates.flop_per_s)


def decode_tok_per_s(cost: DecoderCost, rates: Rates, *, batch: int = 1, context: float = 0.0) -> float:
    """Return the decode rate of all `batch` streams together."""
    return batch / decode_step_s(cost, rates, batch=batch, context=context)


def prefill_s(cost: DecoderCost, rates: Rates, num_tokens: int) -> float:
    """Return the time of one prompt: every linear per token, the head once, attention over half of the context on average."""
    linear = num_tokens * (cost.flop_per_token - cost.head_flop) + cost.head_flop
    attention = num_tokens * num_tokens / 2 * cost.flop_per_token_per_context
    return max(rates.read_s(cost.weight_bytes), (linear + attention) / rates.flop_per_s)


def balanced_batch(cost: DecoderCost, rates: Rates) -> float:
    """Return the batch at which arithmetic takes as long as streaming the weights; below it memory is the limit."""
    return rates.read_s(cost.weight_bytes) * rates.flop_per_s / cost.flop_per_token


def measured_rates(device: DeviceFacts) -> Rates:
    """Return the rates of unquantized work on a device."""
    return Rates(device.read_bytes_per_s, device.matmul_flop_per_s)


def best_case_rates(device: DeviceFacts) -> Rates:
    """Return rates that low-bit work on the device cannot exceed: cache kept warm, integer units at their peak."""
    if device.kind == "cuda":
        return Rates(device.read_bytes_per_s, device.matmul_flop_per_s * INT8_OVER_BFLOAT16_GPU)
    gain = max((INT8_OVER_FLOAT32.get(name, 1) for name in device.instruction_sets), default=1)
    return Rates(
        read_bytes_per_s=device.read_bytes_per_s,
        flop_per_s=device.matmul_flop_per_s * gain,
        cached_bytes=max(device.cache_bytes.values(), default=0),
        cached_read_bytes_per_s=device.read_cached_bytes_per_s,
    )


def best_case_cost(facts: ModelFacts) -> DecoderCost:
    """Return the cost of the model with every multiplied weight in `BEST_WEIGHT_BITS` and no scales."""
    return decoder_cost(facts, BEST_WEIGHT_BITS)
