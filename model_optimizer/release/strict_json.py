"""JSON as a bundle may hold it: UTF-8, of bounded size and depth, no key twice. Looked at before it is parsed."""

import json
import re

MAX_JSON_BYTES = 256 << 20
"""Far above the largest tokenizer.json in use (34 MB, Gemma)."""
MAX_NESTING = 100
MAX_DIGITS = 100
"""Of an integer; the time to read one grows with the square of its length."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""Possessive and closed by the end too, so that a hostile text costs linear time and no memory."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def json_fault(content: bytes) -> str | None:
    """Return why `content` is not JSON that may be read, or None."""
    try:
        read_json(content)
    except ValueError as error:
        return str(error)
    return None


def read_json(content: bytes) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: says in a few words what is wrong with it.
    """
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{len(content)} bytes of JSON, at most {MAX_JSON_BYTES} are read")
    if _is_deep(content):
        raise ValueError(f"JSON nested more than {MAX_NESTING} levels deep")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError("not JSON: it is not UTF-8") from error
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"JSON with the key {name[:60]!r} twice")
        made[name] = value
    return made


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"JSON with a number of {len(digits)} digits, at most {MAX_DIGITS} are read")
    return int(digits)


def _is_deep(content: bytes) -> bool:
    """Return whether brackets are nested deeper than allowed, those in strings left out; without recursion."""
    if content.count(b"[") + content.count(b"{") <= MAX_NESTING:
        return False
    depth = 0
    for bracket in _STRING.sub(b"", content).translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_NESTING:
            return True
    return False
