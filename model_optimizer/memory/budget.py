"""Where the bytes go before anything runs: weights, KV reservation, activations, context, margin.

Pure arithmetic over model facts and what the profile states. KV bytes count KV heads, not attention heads
(X15); the utilisation ratio covers everything that the engine may use, not the cache alone (X17).
"""

from dataclasses import dataclass
from typing import Protocol

from model_optimizer.artifacts.target import BudgetLine, ModelFacts
from model_optimizer.memory.kv_layout import SCALED, VALUE_BYTES, KvLayout
from model_optimizer.spec import Sla, Traffic

FLOAT32_BYTES = 4
RUNTIME_CONTEXT_BYTES = 64 * 2**20
"""Sessions, thread pools and allocator slack of a CPU runtime beside weights and tensors.
Source: a round figure; the memory stage's own check compares the sum with the measured peak."""
CUDA_CONTEXT_BYTES = 700 * 2**20
"""What a process holds of a GPU beside its tensors: context and loaded kernels.
Source: an H200 with torch 2.11, the driver's count: 682 MiB after a first product, 14 more after the native runtime had run."""
UNPACKING_BYTES = 9
"""Per weight of the largest matrix while it is unpacked and multiplied: one byte of code, then two float32 copies.
Source: the operators of `WeightFormat.dequantize`; 504 of the 562 MiB of working memory of an 8B shape on an H200."""
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


class Dimensions(Protocol):
    """What working memory follows from; `ModelFacts` and `ModelShape` both have it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


def activation_bytes(facts: Dimensions, num_tokens: int, num_sequences: int, value_bytes: int = FLOAT32_BYTES) -> int:
    """Return the working memory of one prefill of `num_tokens` beside `num_sequences` decoding rows, in float32 unless told.

    Counted: one row of logits per sequence and for the prompt's last token, attention scores of one layer, and per
    position six vectors of hidden size (residual, normed, Q, K, V, attention output) and two of a gated FFN.

    Source: the operators of a decoder layer; the memory stage checks the sum.
    """
    logits = (num_sequences + 1) * facts.vocab_size
    scores = facts.num_heads * num_tokens * num_tokens
    hidden = num_tokens * (6 * facts.hidden_size + 2 * facts.intermediate_size)
    return value_bytes * (logits + scores + hidden)


def workspace_bytes(layout: KvLayout, num_tokens: int) -> int:
    """Return what attention gathers of `num_tokens` of cache, one layer at a time, until it is in the compute type.

    A value exists as stored and as computed with, where these differ; an 8-bit one passes through float32 on the way.
    """
    widest = max((layer.values_per_token for layer in layout.layers), default=0)
    stored, computed = VALUE_BYTES[layout.precision], VALUE_BYTES[layout.compute_dtype]
    if layout.precision in SCALED:
        in_float32 = FLOAT32_BYTES + (0 if layout.compute_dtype == "float32" else computed)
        return num_tokens * widest * max(stored + FLOAT32_BYTES, in_float32)
    return num_tokens * widest * (stored + (0 if layout.compute_dtype == layout.precision else computed))


def unpacking_bytes(facts: Dimensions) -> int:
    """Return what one packed matrix takes while it is used; a feed-forward layer's are the largest."""
    return UNPACKING_BYTES * facts.hidden_size * max(facts.intermediate_size, facts.hidden_size)


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
    workspace_bytes: int = 0
    """What attention gathers and what kernels ask for beside activations."""
    context_bytes: int = RUNTIME_CONTEXT_BYTES
    process_bytes: int = PROCESS_BYTES
    """Of the interpreter and frameworks; 0 on a device with memory of its own."""

    @property
    def engine_bytes(self) -> int:
        """Return what the engine alone is predicted to hold when every page is in use."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.workspace_bytes + self.context_bytes

    @property
    def margin_bytes(self) -> int:
        return self.usable_bytes - self.engine_bytes - self.process_bytes

    def lines(self) -> tuple[BudgetLine, ...]:
        """Return the table that is printed at start (M2)."""
        return (
            BudgetLine(part="weights", num_bytes=self.weight_bytes, note="as resident in the runtime"),
            BudgetLine(part="kv_reservation", num_bytes=self.kv_bytes, note="all pages of the plan"),
            BudgetLine(part="activations", num_bytes=self.activation_bytes, note="one prefill of a p95 prompt, estimated"),
            BudgetLine(part="workspace", num_bytes=self.workspace_bytes, note="attention's gathering or unpacking"),
            BudgetLine(part="runtime_context", num_bytes=self.context_bytes, note="sessions and allocator slack"),
            BudgetLine(part="process", num_bytes=self.process_bytes, note="interpreter and frameworks"),
            BudgetLine(part="margin", num_bytes=self.margin_bytes, note=f"left of {binary_size(self.usable_bytes)} usable"),
        )
