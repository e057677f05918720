"""Markdown that survives any text: model names and reasons may hold pipes, brackets and line ends."""

import re
from collections.abc import Iterable, Sequence

from model_optimizer.artifacts.measure import Verdict

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")
_SHAPES = {Verdict.ACCEPT: "✔", Verdict.REJECT: "✘", Verdict.INCONCLUSIVE: "◐"}


def cell(text: str) -> str:
    """Return text that shows as itself in a Markdown table or paragraph."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def verdict_words(verdict: Verdict | None) -> str:
    """Return shape and word of a verdict; a measure that does not gate says so."""
    return "shown only" if verdict is None else f"{_SHAPES[verdict]} {verdict}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; every cell is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(text if text == '---' else cell(text) for text in line)} |\n" for line in lines)
