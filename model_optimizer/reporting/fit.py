"""Markdown cut to a size limit so that what is left still reads: between lines, no table without rows, nothing left open.

Knows lines, tables, fences and `<details>`, and nothing about reports.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FENCE = "```"
_SEPARATOR = frozenset("|-: ")

Notice = Callable[[int, int], str]
"""(lines left out, bytes left out) -> what ends a cut text."""


@dataclass(frozen=True, slots=True)
class _Open:
    """What a line leaves open."""

    fenced: bool = False
    folds: int = 0

    def after(self, line: str) -> "_Open":
        if line.startswith(FENCE):
            return _Open(not self.fenced, self.folds)
        if self.fenced:
            return self
        return _Open(self.fenced, self.folds + line.count("<details>") - line.count("</details>"))

    def closing(self) -> str:
        return f"{FENCE}\n" * self.fenced + "\n</details>\n" * max(0, self.folds)


def fit(text: str, limit_bytes: int, notice: Notice) -> bytes:
    """Return UTF-8 of at most `limit_bytes`; where text had to go, its end says how much.

    Law: the result is the text, or a prefix of whole lines, then what closes open folds and fences, then the notice.
    """
    content = text.encode()
    if len(content) <= limit_bytes:
        return content
    lines = text.splitlines(keepends=True)
    ends, states = [0], [_Open()]
    for line in lines:
        ends.append(ends[-1] + len(line.encode()))
        states.append(states[-1].after(line))
    room = limit_bytes - len(notice(len(lines), len(content)).encode())
    kept = max((at for at in range(len(ends)) if ends[at] + len(states[at].closing()) <= room), default=0)
    kept = _whole_blocks(lines, kept)
    return "".join([*lines[:kept], states[kept].closing(), notice(len(lines) - kept, len(content) - ends[kept])]).encode()


def _whole_blocks(lines: Sequence[str], kept: int) -> int:
    """Return how many lines to keep so that no heading, table head or blank line stands last with nothing below it."""
    while kept and _promises_more(lines, kept - 1):
        kept -= 1
    return kept


def _promises_more(lines: Sequence[str], index: int) -> bool:
    line = lines[index].strip()
    if not line or line.startswith("#"):
        return True
    following = lines[index + 1].strip() if index + 1 < len(lines) else ""
    return _separates(line) or (line.startswith("|") and _separates(following))


def _separates(line: str) -> bool:
    return line.startswith("|") and "---" in line and set(line) <= _SEPARATOR
