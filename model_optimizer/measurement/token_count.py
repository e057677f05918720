"""How many tokens an answer and each of its chunks held: by the model's tokenizer, or by what the server says it used.

A chunk is not a token: speculative decoding and busy servers put several into one event. Where the split is not known it is
not guessed: the total still gives the mean time per token, and gaps between chunks go by their own name.

Shapes: N requests, C chunks that carried text.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from model_optimizer.measurement.events import text_of_answer, texts_of_events
from model_optimizer.measurement.http_client import Answer
from model_optimizer.measurement.samples import RequestStatus

TextCounter = Callable[[str], Sequence[int]]
"""Text -> where each of its tokens ends, in characters."""


def count_tokens(answers: Sequence[Answer], counter: TextCounter | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of every answer [N] and of every chunk [C]; 0 where they are not known."""
    totals, chunks = np.zeros(len(answers), dtype=np.int64), list[list[int]]()
    for number, answer in enumerate(answers):
        if counter is None:
            totals[number], found = max(0, answer.used_tokens), _by_usage(answer)
        else:
            totals[number], found = _by_text(answer, counter)
        chunks.append(found)
    return totals, np.array([it for found in chunks for it in found], dtype=np.int64)


def _by_usage(answer: Answer) -> list[int]:
    """Return one token a chunk where the counts agree, else zeros."""
    if answer.reader is None:
        return []
    num_chunks = len(answer.reader.text_times_ns)
    without_text = int(answer.stopped)  # the token that ended it is counted and not shown
    known = num_chunks <= answer.used_tokens <= num_chunks + without_text
    return [int(known)] * num_chunks


def _by_text(answer: Answer, counter: TextCounter) -> tuple[int, list[int]]:
    reader = answer.reader
    if reader is None:
        whole = answer.status == RequestStatus.OK
        return len(counter(text_of_answer(answer.body))) if whole else 0, []
    texts = list(texts_of_events(reader.kept or []))
    ends = counter("".join(texts))
    if len(texts) != len(reader.text_times_ns):
        return len(ends), [0] * len(reader.text_times_ns)
    counts, length, before = list[int](), 0, 0
    for text in texts:
        length += len(text)
        reached = bisect_right(ends, length)
        counts.append(reached - before)
        before = reached
    return len(ends), counts
