"""Requests that no server may answer with anything but 4xx: every field of both endpoints with every kind of wrong value."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

TEXT_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
_NO_NUMBER: tuple[object, ...] = ("x", [], {}, True)
_NO_FLAG: tuple[object, ...] = ("yes", 1, [])
_COMMON: Mapping[str, tuple[object, ...]] = {
    "model": (None, 3, "", "other", "x" * 400, "../../etc/passwd", ["a"], {}),
    "max_tokens": (0, -1, 1.5, 2**31, 10**8, *_NO_NUMBER),
    "temperature": (-0.1, 2.1, *_NO_NUMBER),
    "top_p": (0, -1, 1.01, *_NO_NUMBER),
    "seed": (0.5, 2**63, -(2**63) - 1, *_NO_NUMBER),
    "stop": ("", [""], ["a"] * 5, "x" * 257, 7, {}, [1], True),
    "stream": _NO_FLAG,
    "stream_options": ({"include_usage": True}, "x", 1, []),
    "n": (0, 2, -1, "1", True),
    "presence_penalty": (0.5, -1, *_NO_NUMBER),
    "frequency_penalty": (0.5, -1, *_NO_NUMBER),
    "logit_bias": ({"5": 10}, "x", 1, []),
    "user": (5, [], {}, "x" * 1001),
    "unknown_field": (1, None, "x"),
    "__proto__": ({}, None),
}
_TEXT: Mapping[str, tuple[object, ...]] = {
    "prompt": (None, "", [], [""], ["a", "b"], [[1], [2]], [-1], [2**40], [1.5], ["a", 1], {}, True, 7, [None], [[]], [[-1]]),
    "logprobs": (-1, 6, 1.5, *_NO_NUMBER),
    "echo": (True, "x", 1),
    "suffix": ("end", 1),
    "best_of": (0, 2, "1"),
}
_CHAT: Mapping[str, tuple[object, ...]] = {
    "messages": (
        None, [], {}, "hi", 1, [{}], [None], ["hi"], [[]],
        [{"role": "user"}], [{"content": "hi"}], [{"role": "root", "content": "hi"}], [{"role": None, "content": "hi"}],
        [{"role": "tool", "content": "hi", "tool_call_id": "1"}], [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": []}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": "hi", "extra": 1}], [{"role": "user", "content": "a"}] * 4097,
    ),
    "max_completion_tokens": (0, -1, 1.5, *_NO_NUMBER),
    "logprobs": (1, "x", []),
    "top_logprobs": (2, -1, 21, *_NO_NUMBER),
    "response_format": ({"type": "json_object"}, "x", 1),
    "tools": ([], [{"type": "function", "function": {"name": "f"}}]),
    "tool_choice": ("auto", {}),
    "functions": ([], {}),
    "store": (True, "x"),
    "metadata": ("x", {"a": 1}, []),
    "modalities": (["audio"],),
    "reasoning_effort": ("high",),
}  # fmt: skip
_RAW = (
    b"", b" ", b"{", b"null", b"[]", b'"text"', b"1", b"NaN", b"\xff\xfe", b"\x00", b"{'model': 'x'}", b'{"model": "x", "m',
    b'{"model": "x", "prompt": "\\ud800"}', b'{"model": "x", "prompt": "\xc3\x28"}', b'{"model": "x", "prompt": "a"} trailing',
    b'{"model": "x", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"model": "x", "seed": ' + b"9" * 400 + b"}",
)  # fmt: skip


@dataclass(frozen=True)
class Malformed:
    """One request; what is wrong with it is its name."""

    name: str
    path: str
    body: bytes


def malformed_requests(model: str) -> Iterator[Malformed]:
    """Yield every one of them for a server of `model`."""
    text = {"model": model, "prompt": "a", "max_tokens": 1}
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path, good, own in ((TEXT_PATH, text, _TEXT), (CHAT_PATH, chat, _CHAT)):
        for raw in _RAW:
            yield Malformed(repr(raw[:40]), path, raw)
        for field in good:
            if field != "max_tokens":
                yield Malformed(f"no {field}", path, json.dumps({k: v for k, v in good.items() if k != field}).encode())
        for field, values in {**_COMMON, **own}.items():
            for value in values:
                yield Malformed(f"{field}: {value!r:.40}", path, json.dumps({**good, field: value}).encode())
