"""Where the bytes go before anything runs: weights, KV reservation, activations, context, margin.

Pure arithmetic over model facts and what the profile states. KV bytes count KV heads, not attention heads
(X15); the utilisation ratio covers everything that the engine may use, not the cache alone (X17).
"""

from dataclasses import dataclass

from model_optimizer.artifacts.target import BudgetLine, ModelFacts
from model_optimizer.spec import Sla, Traffic

FLOAT32_BYTES = 4
RUNTIME_CONTEXT_BYTES = 64 * 2**20
"""Sessions, thread pools and allocator slack of a CPU runtime beside weights and tensors.
Source: a round figure; the memory stage's own check compares the sum with the measured peak."""
PROCESS_BYTES = 512 * 2**20
"""An interpreter with numpy, torch and transformers imported, before any model is opened.
Source: resident size 492 MiB with torch 2.13, transformers 5.17 and onnxruntime 1.32 on Linux x86-64."""
UNPACKING_RUNTIMES = frozenset({"torch"})
"""Runtimes that turn quantized weights into float32 at load. Source: their own `RuntimeFacts.notes`."""
HEAD_COPYING_RUNTIMES = frozenset({"onnxruntime"})
"""Runtimes that hold a tied float32 head twice. Source: their own `RuntimeFacts.notes`."""


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_value: int) -> int:
    """Return 2 x layers x KV heads x head dimension x bytes per value: keys and values of one token (M1, X15).

    Llama-3-8B in float16: 2 x 32 x 8 x 128 x 2 = 131,072, a quarter of what attention heads would give.
    """
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_value


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Return how many pages hold `num_tokens`: the last one may be part empty."""
    return -(-num_tokens // page_tokens)


def binary_size(num_bytes: float) -> str:
    """Return bytes in the largest binary unit that keeps the number at 1 or more, e.g. `256 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.4g} {unit}"


def request_tokens(traffic: Traffic, sla: Sla) -> int:
    """Return the tokens of a long request, p95 of prompt plus p95 of output, within the longest allowed."""
    return min(traffic.prompt_tokens.p95 + traffic.output_tokens.p95, sla.max_model_len)


def activation_bytes(facts: ModelFacts, num_tokens: int, num_sequences: int) -> int:
    """Return the float32 working memory of one prefill of `num_tokens` beside `num_sequences` decoding rows.

    Counted: one row of logits per sequence and for the prompt's last token, attention scores of one layer, and per
    position six vectors of hidden size (residual, normed, Q, K, V, attention output) and two of a gated FFN.

    Source: the operators of a decoder layer; the memory stage checks the sum.
    """
    logits = (num_sequences + 1) * facts.vocab_size
    scores = facts.num_heads * num_tokens * num_tokens
    hidden = num_tokens * (6 * facts.hidden_size + 2 * facts.intermediate_size)
    return FLOAT32_BYTES * (logits + scores + hidden)


def head_bytes(facts: ModelFacts) -> int:
    """Return the float32 bytes of the output head, which is the embedding itself where they are tied."""
    return FLOAT32_BYTES * facts.vocab_size * facts.hidden_size


def resident_weight_bytes(runtime: str, facts: ModelFacts, stored_bytes: int) -> int:
    """Return the weight bytes that a runtime holds of an engine whose weights have `stored_bytes` on disk.

    Some runtimes unpack everything to float32; some pack a tied head for multiplying beside the rows for looking up.
    """
    if runtime in UNPACKING_RUNTIMES:
        return facts.num_parameters * FLOAT32_BYTES
    return stored_bytes + (head_bytes(facts) if facts.tied_head and runtime in HEAD_COPYING_RUNTIMES else 0)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes by part, and what the engine may use altogether."""

    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    usable_bytes: int
    """Utilisation ratio x free memory, or the limit of the service level where that is less."""

    @property
    def engine_bytes(self) -> int:
        """Return what the engine alone is predicted to hold when every page is in use."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + RUNTIME_CONTEXT_BYTES

    @property
    def margin_bytes(self) -> int:
        return self.usable_bytes - self.engine_bytes - PROCESS_BYTES

    def lines(self) -> tuple[BudgetLine, ...]:
        """Return the table that is printed at start (M2)."""
        return (
            BudgetLine(part="weights", num_bytes=self.weight_bytes, note="as resident in the runtime"),
            BudgetLine(part="kv_reservation", num_bytes=self.kv_bytes, note="all pages of the plan"),
            BudgetLine(part="activations", num_bytes=self.activation_bytes, note="one prefill of a p95 prompt, estimated"),
            BudgetLine(part="runtime_context", num_bytes=RUNTIME_CONTEXT_BYTES, note="sessions and allocator slack"),
            BudgetLine(part="process", num_bytes=PROCESS_BYTES, note="interpreter and frameworks"),
            BudgetLine(part="margin", num_bytes=self.margin_bytes, note=f"left of {binary_size(self.usable_bytes)} usable"),
        )
