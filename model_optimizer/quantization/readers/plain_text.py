"""Plain text: paragraphs between blank lines; without a blank line, every line is a record.

A heading in wiki markup (`= Title =`) belongs to the paragraph below it, so that it is no record of its own.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from model_optimizer.quantization.reading import READERS, Rows, text_lines


@READERS.register("txt")
@READERS.register("text")
def read_plain_text(path: Path) -> Rows:
    """Yield every paragraph as the field `text`, with the number of its first line."""
    lines = list(text_lines(path))
    headings: list[tuple[int, str]] = []
    for paragraph in _paragraphs(lines):
        if len(paragraph) == 1 and _is_heading(paragraph[0][1]):
            headings += paragraph
            continue
        yield _row([*headings, *paragraph])
        headings = []
    if headings:
        yield _row(headings)


def _row(lines: list[tuple[int, str]]) -> tuple[str, dict[str, object]]:
    return f"line {lines[0][0]}", {"text": "\n".join(line.strip() for _, line in lines)}


def _paragraphs(lines: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    inner = lines
    while inner and not inner[-1][1].strip():
        inner = inner[:-1]
    if all(line.strip() for _, line in inner):
        yield from ([line] for line in inner)
        return
    for blank, group in groupby(lines, key=lambda line: not line[1].strip()):
        if not blank:
            yield list(group)


def _is_heading(line: str) -> bool:
    text = line.strip()
    return len(text) > 2 and text.startswith("=") and text.endswith("=")
