"""What the bytes of an answer say, read in passing: how many events carried text, whether it ended, what was used.

JSON is not parsed while a run goes on: quotes inside a JSON string are escaped, so `"content":"` in the bytes is always a field.
"""

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

TEXT_FIELD = re.compile(rb't":(?<="text":|ntent":)[ ]?"(?!")')
"""A field `text`, `content` or `reasoning_content` that is not empty: neither the role-only first chunk nor a usage record has
one. It begins with the letter that they end on, since a search for fixed bytes is six times as fast as one for alternatives."""
_REASONING_FIELD = re.compile(rb'"reasoning":[ ]?"(?!")')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":[ ]?(\d+)')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":[ ]?(\d+)')
_FINISH = re.compile(rb'"finish_reason":[ ]?"(\w+)"')
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]")
_ERROR = re.compile(rb'(?:^|[\r\n])data: ?\{[ ]?"error":[ ]?(?!null)')
UNKNOWN = -1
_LAST_BYTES = 4096
_NUM_RECENT = 6
"""Reads kept until the end: finish_reason, usage record and [DONE] may come in one each, with an event or two around them."""


class StreamReader:
    """Reads the server-sent events of one answer as they arrive."""

    __slots__ = ("_recent", "_tail", "kept", "text_times_ns")

    def __init__(self, *, keep: bool) -> None:
        self.text_times_ns: list[int] = []
        """Arrival of every event that carried text."""
        self.kept: list[bytes] | None = [] if keep else None
        """Everything, where texts are asked for."""
        self._recent: deque[bytes] = deque(maxlen=_NUM_RECENT)
        self._tail = b""

    def feed(self, payload: bytes, now_ns: int) -> None:
        """Take what arrived at `now_ns`; an event counts once it is whole."""
        if self._tail:
            payload = self._tail + payload
            self._tail = b""
        if not payload.endswith(b"\n\n"):
            cut = max(payload.rfind(b"\n\n") + 2, payload.rfind(b"\n\r\n") + 3, 2)
            if cut <= 2:
                self._tail = payload
                return
            self._tail, payload = payload[cut:], payload[:cut]
        num = num_texts(payload)
        if num == 1:
            self.text_times_ns.append(now_ns)
        elif num:
            self.text_times_ns += [now_ns] * num
        if self.kept is not None:
            self.kept.append(payload)
        self._recent.append(payload)

    def end(self) -> "StreamEnd":
        """Return what the last events say, once the answer is whole."""
        last = (b"".join(self._recent) + self._tail)[-_LAST_BYTES:]
        at = last.rfind(b'"finish_reason":')
        finish = _FINISH.match(last, at) if at >= 0 else None
        error = _ERROR.search(last) if b'"error"' in last else None
        return StreamEnd(
            ended=finish is not None or (b"[DONE]" in last and _DONE.search(last) is not None),
            stopped=finish is not None and finish.group(1) == b"stop",
            error=last[error.start() :].strip() if error else b"",
            used_tokens=_last_count(last, _COMPLETION_TOKENS, b'"completion_tokens":'),
            used_prompt=_last_count(last, _PROMPT_TOKENS, b'"prompt_tokens":'),
        )

    def forget(self) -> None:
        """Let go of what was kept for `end`: a run holds every reader to its own end."""
        self._recent.clear()
        self._tail = b""


def _last_count(last: bytes, pattern: re.Pattern[bytes], name: bytes) -> int:
    at = last.rfind(name)
    found = pattern.match(last, at) if at >= 0 else None
    return int(found.group(1)) if found else UNKNOWN


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a stream ended."""

    ended: bool
    """Whether the answer said that it is complete."""
    stopped: bool
    """By a stop token, which has no text, and not by its length."""
    error: bytes
    """The event that told one."""
    used_tokens: int
    used_prompt: int


def num_texts(payload: bytes) -> int:
    """Return how many of these whole events carry text."""
    if b'"reasoning":' in payload:  # vLLM's field: null, or the only text of the event
        return sum(_has_text(line) for line in payload.splitlines())
    return len(TEXT_FIELD.findall(payload))


def _has_text(event: bytes) -> bool:
    return TEXT_FIELD.search(event) is not None or _REASONING_FIELD.search(event) is not None


def read_whole(body: bytes) -> tuple[int, int, bool]:
    """Return completion tokens and prompt tokens (-1 where not told) of an answer in one piece, and whether it has text."""
    completion, prompt = _COMPLETION_TOKENS.search(body), _PROMPT_TOKENS.search(body)
    return (
        int(completion.group(1)) if completion else UNKNOWN,
        int(prompt.group(1)) if prompt else UNKNOWN,
        _has_text(body),
    )


def texts_of_events(payloads: list[bytes]) -> Iterator[str]:
    """Yield the text of every event that carries some, in order: as many as `StreamReader` gave times for."""
    for line in b"".join(payloads).splitlines():
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or not _has_text(data):
            continue
        yield text_of_answer(data)


def text_of_answer(body: bytes) -> str:
    """Return the text of one event or of a whole answer; empty where it is not one."""
    try:
        choices = json.loads(body).get("choices")
    except (ValueError, AttributeError):
        return ""
    parts = list[str]()
    for choice in choices if isinstance(choices, list) else ():
        holder = choice.get("delta") or choice.get("message") or choice
        parts += [it for name in ("reasoning_content", "reasoning", "content", "text") if isinstance(it := holder.get(name), str)]
    return "".join(parts)
