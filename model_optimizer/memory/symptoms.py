"""How running out of memory shows, and what it means: at load the weights are to blame, later the cache and the requests (M8)."""

from model_optimizer.artifacts.base import Frozen
from model_optimizer.memory.budget import Budget, binary_size
from model_optimizer.memory.kv_layout import VALUE_BYTES
from model_optimizer.memory.subject import Subject


class Symptom(Frozen):
    """One row of the table."""

    when: str
    """`load` or `run`."""
    symptom: str
    cause: str
    here: str
    """What the figures of this model and device say about it."""
    remedy: str


def symptoms(subject: Subject, runtime: str, dtype: str, budget: Budget, packed_bytes: int) -> tuple[Symptom, ...]:
    """Return every way to run out, first those of loading; `packed_bytes` is what the weights take as stored."""
    return _at_load(runtime, budget, packed_bytes, subject.num_parameters * VALUE_BYTES[dtype]) + _at_run(budget)


def _at_load(runtime: str, budget: Budget, packed_bytes: int, unpacked_bytes: int) -> tuple[Symptom, ...]:
    low_bit = packed_bytes < 0.9 * unpacked_bytes
    off = low_bit and budget.weight_bytes >= 0.9 * unpacked_bytes
    over = budget.weight_bytes + budget.context_bytes + budget.process_bytes - budget.usable_bytes
    return (
        _row(
            "load",
            "ends while shards are read",
            "the weights alone are too big",
            f"{binary_size(budget.weight_bytes)} of weights, " + (f"{binary_size(over)} too many" if over > 0 else "which fit"),
            "fewer bits, or a larger device",
        ),
        _row(
            "load",
            "a quantized model takes as much as the original",
            "low bits are not really in use: the runtime unpacks them",
            f"{runtime} holds {binary_size(budget.weight_bytes)} of {binary_size(packed_bytes)} stored"
            + ("; that is the unpacked size" if off else ""),
            "keep weights packed, or a runtime with kernels for the format",
        ),
        _row(
            "load",
            "a peak above the final size, then it falls back",
            "packed and unpacked weights exist together while a shard is decompressed",
            f"up to {binary_size(packed_bytes + unpacked_bytes)}" if off else "nothing is unpacked at load",
            "load shard by shard; smaller shards",
        ),
        _row(
            "load",
            "ends after the weights, before the first request",
            "the KV reservation is larger than what is left",
            f"{binary_size(budget.kv_bytes)} of KV, margin {binary_size(budget.margin_bytes)}",
            "check KV against concurrency x max_model_len before lowering bits; lower utilization_ratio",
        ),
    )


def _at_run(budget: Budget) -> tuple[Symptom, ...]:
    plateau = binary_size(budget.engine_bytes + budget.process_bytes)
    return (
        _row(
            "run",
            "ends at the first long prompt",
            "activations of one prefill were estimated too low",
            f"{binary_size(budget.activation_bytes)} of activations, {binary_size(budget.workspace_bytes)} of workspace",
            "prefill in chunks, a smaller chunk",
        ),
        _row(
            "run",
            "requests wait or are preempted, memory stays flat",
            "concurrency or lengths are above the plan; the pool is full, which is no leak",
            f"{binary_size(budget.kv_bytes)} of KV",
            "lower concurrency or max_model_len, an 8-bit cache, a larger pool",
        ),
        _row(
            "run",
            "a ramp, then a plateau",
            "the pool fills up: as planned",
            f"plateau at {plateau}",
            "none",
        ),
        _row(
            "run",
            "a steady rise without a plateau",
            "a leak, or contexts without a limit",
            f"anything above {plateau}",
            "set max_model_len and the number of sequences; run the soak, which fits a slope; a restart only hides it",
        ),
        _row(
            "run",
            "wrong words now and then",
            "not fragmentation: a page read before it was written, or by two owners",
            "pages are of one size, so none is lost between them",
            "run in debug mode: freed pages are poisoned, ownership is checked, and the fault is named",
        ),
    )


def _row(when: str, symptom: str, cause: str, here: str, remedy: str) -> Symptom:
    return Symptom(when=when, symptom=symptom, cause=cause, here=here, remedy=remedy)
