"""The speed axis: every engine runs the same requests once per round, in alternating order.

All engines are open together, so that a round is short and its pairs share the machine's mood.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from model_optimizer.artifacts.base import Frozen
from model_optimizer.journal import Journal
from model_optimizer.measurement.interleave import schedule
from model_optimizer.measurement.load import run_closed_loop
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, Progress

WARM_UP_TOKENS = 4


class Round(Frozen):
    """One finished round, by label of the engine; one journal record."""

    index: int
    decode_tok_per_s: dict[str, float]
    latency_ms: dict[str, tuple[float, ...]]
    """End to end, one per request that finished."""
    num_failed: dict[str, int]


@dataclass(frozen=True, slots=True)
class Heat:
    """What every engine runs in every round."""

    requests: Sequence[GenerationRequest]
    concurrency: int
    num_rounds: int


def race(
    engines: Mapping[str, Callable[[], LogitsRuntime]], heat: Heat, journal: Journal[Round], progress: Progress
) -> tuple[Round, ...]:
    """Return `heat.num_rounds` rounds, continuing after a kill behind the last whole one in the journal."""
    order: dict[int, list[str]] = {}
    for index, label in schedule(tuple(engines), heat.num_rounds):
        order.setdefault(index, []).append(label)
    todo = [index for index in order if index >= len(journal.records)]
    if not todo:
        return tuple(journal.records)
    with ExitStack() as stack:
        opened = {label: stack.enter_context(closing(open_engine())) for label, open_engine in engines.items()}
        for runtime in opened.values():
            run_closed_loop(runtime, [_short(request) for request in heat.requests[: heat.concurrency]], heat.concurrency)
        for index in progress.track(todo, "interleaved rounds"):
            journal.append(_round(index, {label: opened[label] for label in order[index]}, heat))
    return tuple(journal.records)


def _short(request: GenerationRequest) -> GenerationRequest:
    return GenerationRequest(prompt=request.prompt, max_new_tokens=min(WARM_UP_TOKENS, request.max_new_tokens))


def _round(index: int, engines: Mapping[str, LogitsRuntime], heat: Heat) -> Round:
    records = {label: run_closed_loop(runtime, heat.requests, heat.concurrency) for label, runtime in engines.items()}
    return Round(
        index=index,
        decode_tok_per_s={label: record.decode_tok_per_s() for label, record in records.items()},
        latency_ms={label: tuple(record.end_to_end_ms().tolist()) for label, record in records.items()},
        num_failed={label: record.num_failed for label, record in records.items()},
    )
