"""A trial of an engine at the edges: one token, ends of pages, several rows of unequal length, and as long as it may get."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, TokenEvent

NEW_TOKENS = 3
"""Enough that a prompt one short of a page's end goes over it."""
TIE_NATS = 0.25
"""Two tokens whose log-probabilities are this close may swap places when sums are made in another order."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the trial found."""

    num_requests: int
    longest: int
    """Tokens of the longest sequence."""
    fault: str | None
    """What went wrong first."""


def edge_lengths(plan: KvPlan) -> tuple[int, ...]:
    """Return prompt lengths: 1, around the first and the second page's end, and the longest that leaves room for new tokens."""
    page, longest = plan.page_tokens, plan.max_model_len - NEW_TOKENS
    borders = {1, page - 1, page, page + 1, 2 * page - 1, 2 * page, longest}
    return tuple(sorted(length for length in borders if 1 <= length <= longest))


def smoke_run(runtime: LogitsRuntime, text: Sequence[int], plan: KvPlan) -> Trial:
    """Generate greedily from every edge length alone, then from the short ones together.

    Each must end with as many tokens as asked for and finite log-probabilities, and what shares a batch must not change them.
    """
    lengths = edge_lengths(plan)
    prompts = [tuple(text[at % len(text)] for at in range(length)) for length in lengths]
    alone = [_generate(runtime, [prompt])[0] for prompt in prompts]
    short = [at for at, length in enumerate(lengths) if length <= 2 * plan.page_tokens][: plan.max_batch]
    together = _generate(runtime, [prompts[at] for at in short])
    faults = [_fault(lengths[at], events) for at, events in [*enumerate(alone), *zip(short, together, strict=True)]]
    faults += [_mixed(lengths[at], alone[at], events) for at, events in zip(short, together, strict=True)]
    first = next((fault for fault in faults if fault is not None), None)
    return Trial(len(prompts) + len(short), max(lengths) + NEW_TOKENS, first)


def _generate(runtime: LogitsRuntime, prompts: Sequence[tuple[int, ...]]) -> list[list[TokenEvent]]:
    """Return the events of every prompt; they run together."""
    ids = [runtime.submit(GenerationRequest(prompt, NEW_TOKENS)) for prompt in prompts]
    found: dict[int, list[TokenEvent]] = {identity: [] for identity in ids}
    while events := runtime.step():
        for event in events:
            found[event.request].append(event)
    return [found[identity] for identity in ids]


def _fault(length: int, events: Sequence[TokenEvent]) -> str | None:
    if len(events) != NEW_TOKENS:
        return f"a prompt of {length} tokens gives {len(events)} tokens instead of {NEW_TOKENS}"
    broken = [event.log_prob for event in events if not math.isfinite(event.log_prob)]
    return f"a prompt of {length} tokens gives a log-probability of {broken[0]}" if broken else None


def _mixed(length: int, alone: Sequence[TokenEvent], together: Sequence[TokenEvent]) -> str | None:
    """Say where a row's tokens depend on its neighbours; behind a near tie the two have gone apart and say no more."""
    for one, other in zip(alone, together, strict=False):
        gap = abs(one.log_prob - other.log_prob)
        if gap > TIE_NATS:
            return (
                f"a prompt of {length} tokens gives token {one.token} at {one.log_prob:.3f} nats alone and {other.token} at "
                f"{other.log_prob:.3f} beside others"
            )
        if one.token != other.token:
            return None
    return None
