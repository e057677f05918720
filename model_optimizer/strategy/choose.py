"""Choosing one candidate: limits are hard, the weighted score only ranks what keeps them (X2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from model_optimizer.decisions import Decision
from model_optimizer.errors import UnsupportedError

LATENCY_WEIGHT, MEMORY_WEIGHT, ACCURACY_WEIGHT, COST_WEIGHT = 0.4, 0.3, 0.2, 0.1
"""Source: REQUIREMENTS S5; by X2 they rank feasible points and never trade accuracy against a limit."""


@dataclass(frozen=True, slots=True)
class Option:
    """What the choice needs to know of one measured candidate."""

    label: str
    quantized: bool
    time_per_token_ms: float
    resident_bytes: int
    kl_nats: float
    dominated_by: str | None
    infeasible_because: str | None
    slower_because: str | None = None
    """Why it is surely slower here than the baseline, at the stated concurrency; None: it may be faster."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen label, the baseline's, every score, and the log that says why and why not."""

    chosen: str
    baseline: str
    scores: dict[str, float]
    decisions: tuple[Decision, ...]
    fallback: str | None
    """Why the choice breaks a limit itself, or None."""


def score(option: Option, baseline: Option, max_kl_nats: float) -> float:
    """Return 0.4 latency improvement + 0.3 memory reduction + 0.2 accuracy preservation + 0.1 cost saving.

    Each part is a share of the baseline: 1 - time/time, 1 - bytes/bytes, 1 - KL/limit (floored at 0). At one
    concurrency on one machine the cost of a token is machine time, so its saving equals the latency part.
    The baseline itself scores 0.2.
    """
    latency = 1 - option.time_per_token_ms / baseline.time_per_token_ms
    memory = 1 - option.resident_bytes / baseline.resident_bytes
    accuracy = max(0.0, 1 - option.kl_nats / max_kl_nats)
    return LATENCY_WEIGHT * latency + MEMORY_WEIGHT * memory + ACCURACY_WEIGHT * accuracy + COST_WEIGHT * latency


def baseline_of(options: Sequence[Option]) -> Option:
    """Return the fastest unquantized option, of which there is at least one."""
    return min((o for o in options if not o.quantized), key=lambda o: (o.time_per_token_ms, o.label))


def choose(options: Sequence[Option], *, max_kl_nats: float, pinned: str | None = None) -> Choice:
    """Rank the feasible options and say of every other one why it was not taken.

    Where nothing quantized is feasible the fastest unquantized option is taken, which is also the baseline:
    the fastest measured unquantized option. `options` holds at least one unquantized one. What is surely slower here than
    that is not taken unless nothing else keeps the limits. With a `pinned` precision every quantized option is of it, and the
    best of them is taken whatever limit it breaks.

    Raises:
        UnsupportedError: a quantized precision is pinned and no option is of it.
    """
    baseline = baseline_of(options)
    if pinned is not None:
        return _choose_pinned(options, baseline, max_kl_nats, pinned)
    scores = {o.label: score(o, baseline, max_kl_nats) for o in options}
    feasible = [o for o in options if o.infeasible_because is None]
    worth = [o for o in feasible if o.slower_because is None] or feasible
    ranked = sorted(worth, key=lambda o: (-scores[o.label], o.kl_nats, o.label))
    if any(o.quantized for o in worth):
        chosen, fallback = ranked[0], None
        because = f"it has the best score of {len(worth)} feasible candidates"
        because += f", although it is {chosen.slower_because}" if chosen.slower_because else ""
    else:
        chosen, fallback = baseline, baseline.infeasible_because
        kept = "keeps every limit and is no slower here" if any(o.quantized for o in feasible) else "keeps every limit"
        because = f"no quantized candidate {kept}, so the fastest unquantized one is taken"
    decisions = [_taken(chosen, because, scores)]
    decisions += [_refused(o, chosen, scores) for o in sorted(options, key=lambda o: -scores[o.label]) if o is not chosen]
    return Choice(chosen.label, baseline.label, scores, tuple(decisions), fallback)


def _choose_pinned(options: Sequence[Option], baseline: Option, max_kl_nats: float, pinned: str) -> Choice:
    """Take the best quantized option: feasible ones first; accuracy counts up to the worst KL where that breaks the limit."""
    quantized = [o for o in options if o.quantized]
    if not quantized:
        raise UnsupportedError(
            f"quantization.default_precision pins {pinned}, of which no candidate could be built here; the scan's log says why: "
            "choose another runtime or precision, or auto"
        )
    worst_kl_nats = max(max_kl_nats, *(o.kl_nats for o in quantized))
    scores = {o.label: score(o, baseline, worst_kl_nats) for o in options}
    chosen = min(quantized, key=lambda o: (o.infeasible_because is not None, -scores[o.label], o.kl_nats, o.label))
    broken = chosen.infeasible_because
    because = f"the profile pins {pinned}, and it has the best score of {len(quantized)} candidates of that precision"
    because += f", although {broken}" if broken else ""
    because += f"; it is {chosen.slower_because}" if chosen.slower_because else ""
    decisions = [_taken(chosen, because, scores, {"max_kl_nats": max_kl_nats, "scored_kl_nats": worst_kl_nats})]
    decisions += [_refused(o, chosen, scores, pinned) for o in sorted(options, key=lambda o: -scores[o.label]) if o is not chosen]
    return Choice(chosen.label, baseline.label, scores, tuple(decisions), broken)


def _numbers(option: Option, scores: dict[str, float]) -> dict[str, float]:
    return {
        "score_ratio": scores[option.label],
        "time_per_token_ms": option.time_per_token_ms,
        "resident_bytes": option.resident_bytes,
        "kl_nats": option.kl_nats,
    }


def _taken(option: Option, because: str, scores: dict[str, float], more: Mapping[str, float] = MappingProxyType({})) -> Decision:
    return Decision(subject=option.label, choice="chosen", because=because, numbers=_numbers(option, scores) | dict(more))


def _refused(option: Option, chosen: Option, scores: dict[str, float], pinned: str | None = None) -> Decision:
    """Say why an option was passed over: a pinned precision, a limit, its speed here, domination, or its rank."""
    if pinned and not option.quantized:
        because = f"the profile pins {pinned}"
    elif option.infeasible_because:
        because = f"infeasible: {option.infeasible_because}"
    elif option.slower_because:
        because = option.slower_because
    elif option.dominated_by:
        because = f"dominated by {option.dominated_by}"
    else:
        because = f"its score is below that of {chosen.label}"
    numbers = {**_numbers(option, scores), "chosen_score_ratio": scores[chosen.label]}
    return Decision(subject=option.label, choice="not chosen", because=because, numbers=numbers)
