"""What a client may do at the edges: nothing, too much, the longest, the shortest, and all of it in swings.

Each trial answers with what went wrong, or with nothing. What must be refused must be refused by a ConfigError, and the
engine must serve the next request as before.
"""

from collections.abc import Callable, Sequence

from model_optimizer.errors import ConfigError
from model_optimizer.measurement.load import LoadRecord, run_closed_loop
from model_optimizer.protocols import GenerationRequest, Runtime
from model_optimizer.traffic.lengths import prompt_of_length

JUMP_FROM_TOKENS, JUMP_TO_TOKENS = 128, 4096
"""A prompt of the second length arrives while prompts of the first run; both bounded by the engine."""
NEW_TOKENS = 4
UNKNOWN_TOKEN = 2**31 - 1


def run_trials(runtime: Runtime, text_tokens: Sequence[int], concurrency: int) -> list[tuple[str, str]]:
    """Return each trial's name with what went wrong in it, "" for nothing."""
    longest = runtime.facts.max_model_len
    batch = min(2 * concurrency, 2 * runtime.facts.max_batch)
    trials: tuple[tuple[str, Callable[[], str]], ...] = (
        ("length jump", lambda: _jump(runtime, text_tokens, longest)),
        ("batch swings", lambda: _swings(runtime, text_tokens, batch, longest)),
        ("refusals", lambda: _refusals(runtime, text_tokens, longest)),
        ("extreme prompts", lambda: _extremes(runtime, text_tokens, longest)),
    )
    return [(name, trial()) for name, trial in trials]


def _jump(runtime: Runtime, text_tokens: Sequence[int], longest: int) -> str:
    new = min(NEW_TOKENS, longest // 2)
    high = max(1, min(JUMP_TO_TOKENS, longest - new))
    low = max(1, min(JUMP_FROM_TOKENS, high // 4))
    requests = [GenerationRequest(prompt_of_length(text_tokens, length), new) for length in (low, high, low, high)]
    return _complaint(f"prompts of {low} and {high} tokens together", run_closed_loop(runtime, requests, 2), requests)


def _swings(runtime: Runtime, text_tokens: Sequence[int], batch: int, longest: int) -> str:
    """One request alone, many, one, many, one: alone it must give the same tokens every time."""
    length = max(1, min(16, longest // 4))
    one = [GenerationRequest(prompt_of_length(text_tokens, length), NEW_TOKENS)]
    many = [GenerationRequest(prompt_of_length(text_tokens, length, start), NEW_TOKENS) for start in range(batch)]
    alone = []
    for requests in (one, many, one, many, one):
        record = run_closed_loop(runtime, requests, len(requests))
        if complaint := _complaint(f"{len(requests)} requests at once", record, requests):
            return complaint
        alone += [record.tokens_of(0)] if requests is one else []
    return "" if len(set(alone)) == 1 else "one request alone gives other tokens after many ran at once"


def _refusals(runtime: Runtime, text_tokens: Sequence[int], longest: int) -> str:
    """Ask for what cannot be, then for something that can."""
    token = prompt_of_length(text_tokens, 1)
    impossible = {
        "an empty prompt": GenerationRequest((), 1),
        "no new token": GenerationRequest(token, 0),
        "one token more than the engine holds": GenerationRequest(prompt_of_length(text_tokens, longest), 1),
        "a negative token": GenerationRequest((-1,), 1),
        "a token outside the vocabulary": GenerationRequest((UNKNOWN_TOKEN,), 1),
    }
    for what, request in impossible.items():
        try:
            runtime.cancel(runtime.submit(request))
        except ConfigError:
            continue
        return f"{what} was not refused"
    possible = [GenerationRequest(token, 1)]
    return _complaint("a sound request after refused ones", run_closed_loop(runtime, possible, 1), possible)


def _extremes(runtime: Runtime, text_tokens: Sequence[int], longest: int) -> str:
    """The shortest, the longest, all tokens equal, and the most output."""
    first, half = prompt_of_length(text_tokens, 1), max(1, longest // 2)
    requests = [
        GenerationRequest(first, 1),
        GenerationRequest(prompt_of_length(text_tokens, longest - 1), 1),
        GenerationRequest(first * half, 1),
        GenerationRequest(first, min(longest - 1, 4 * NEW_TOKENS)),
    ]
    return _complaint("shortest, longest and monotonous prompts", run_closed_loop(runtime, requests, 2), requests)


def _complaint(what: str, record: LoadRecord, requests: Sequence[GenerationRequest]) -> str:
    """Say which requests failed, gave values that are not finite, or too few tokens."""
    if record.num_failed:
        return f"{what}: {record.num_failed} of {record.num_requests} failed"
    if record.num_non_finite:
        return f"{what}: {record.num_non_finite} log-probabilities are not finite"
    asked = sum(request.max_new_tokens for request in requests)
    return "" if record.token_times_ns.size == asked else f"{what}: {record.token_times_ns.size} tokens for {asked} asked"
