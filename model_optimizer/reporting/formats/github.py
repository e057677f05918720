"""The report on GitHub: a job summary (1 MiB per step) and the one comment of a pull request (64 KiB).

Both open with what did not pass. Texts of models and profiles notify nobody and link nowhere.
"""

import re
from collections.abc import Sequence

from model_optimizer.artifacts.measure import Dimension, Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.annotations import visible
from model_optimizer.reporting.fit import fit
from model_optimizer.reporting.formats.markdown import markdown_sections
from model_optimizer.reporting.markup import cell, table, verdict_words
from model_optimizer.reporting.renderers import RENDERERS, Renderer
from model_optimizer.reporting.tables import MeasureRow, measure_rows, not_measured
from model_optimizer.reporting.text import shortened, size

SUMMARY_LIMIT_BYTES = 1_048_576
"""Source: GitHub documentation, workflow commands, step isolation and limits; a larger summary is dropped as a whole."""
COMMENT_LIMIT_BYTES = 65_536
"""Source: GitHub's API refuses a body of more than 65,536 characters; counted in bytes here, which are no fewer."""
STEP_ROOM_BYTES = 4_096
"""Left for what the step itself adds to its summary."""
GATES = ("dimension", "measure", "value", "baseline", "change", "95 % interval", "limit", "verdict", "note")
LONGEST_CELL = 300
_ZERO_WIDTH = "\u200b"
_LINK = re.compile(r"(?i)(https?:|ftp:)(?=//)|\bwww(?=\.)")
_ORDER = (Verdict.REJECT, Verdict.INCONCLUSIVE, Verdict.ACCEPT)


def render_github(report: Report, notes: Sequence[str] = ()) -> bytes:
    """Return the Markdown report, `notes` and what did not pass first, cut between lines where it would exceed the limit."""
    opening, *rest = markdown_sections(report)
    failed = [cells for cells in gate_cells(report) if cells[-2] != verdict_words(Verdict.ACCEPT)]
    what_failed = [f"## What did not pass\n\n{table(GATES, failed)}"] if failed else []
    text = "\n".join([neutral(opening), *(f"{note}\n" for note in notes), neutral("\n".join([*what_failed, *rest]))])
    return truncate(text, SUMMARY_LIMIT_BYTES - STEP_ROOM_BYTES)


def render_comment(report: Report, notes: Sequence[str], marker: str) -> bytes:
    """Return the comment: verdict, headline, `notes` (a line of Markdown each, as they are), every gate, failed ones first.

    `marker` is the comment's first line, by which its next edition finds it.
    """
    missing = [f"{what}: {why}" for what, why in not_measured(report)]
    parts = [
        f"## {verdict_words(report.verdict)}: {cell(shortened(report.name, LONGEST_CELL))}",
        cell(shortened(report.headline, 4 * LONGEST_CELL)),
        table(GATES, gate_cells(report)).rstrip("\n"),
        _folded("warnings", report.warnings),
        _folded("not measured", missing),
    ]
    head, headline, *rest = (neutral(part) for part in parts)
    return truncate(
        "\n\n".join([marker, head, headline, *notes, *(part for part in rest if part)]) + "\n",
        COMMENT_LIMIT_BYTES,
    )


def gate_cells(report: Report) -> list[tuple[str, ...]]:
    """Return a row of `GATES` per measure that gates: rejected, undecided, accepted; each in the order of the dimensions."""
    found = [
        (dimension, row)
        for dimension in Dimension
        if dimension in report.dimensions
        for row in measure_rows(report, dimension)
        if row.verdict is not None
    ]
    found.sort(key=lambda pair: _ORDER.index(pair[1].verdict or Verdict.ACCEPT))
    return [_cells(dimension, row) for dimension, row in found]


def truncate(text: str, limit_bytes: int, whole: str = "The bundle's metrics/report.md has all of it.") -> bytes:
    """Return UTF-8 of at most `limit_bytes`; what is cut ends at a line end and says how much is missing and where it is."""

    def notice(num_lines: int, num_bytes: int) -> str:
        missing = f"{num_lines:,} lines, {size(num_bytes)}"
        return f"\n\n_The rest is left out here ({missing}): GitHub takes {size(limit_bytes)}. {whole}_\n"

    return fit(text, limit_bytes, notice)


def neutral(text: str) -> str:
    """Return text in which an @ notifies nobody, an address becomes no link, and nothing unseen changes its order."""
    return _LINK.sub(lambda found: found[0] + _ZERO_WIDTH, visible(text)).replace("@", f"@{_ZERO_WIDTH}")


def _cells(dimension: Dimension, row: MeasureRow) -> tuple[str, ...]:
    value = f"{row.value} ({row.origin})" if row.origin else row.value
    name, note = shortened(row.name, LONGEST_CELL), shortened(row.note, LONGEST_CELL)
    figures = (value, row.baseline, row.change, row.interval, row.limit)
    return (dimension.value, name, *figures, verdict_words(row.verdict), note)


def _folded(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    listed = "".join(f"- {cell(shortened(line, LONGEST_CELL))}\n" for line in lines)
    return f"<details><summary>{len(lines):,} × {title}</summary>\n\n{listed}\n</details>"


RENDERERS.register("github")(Renderer("summary.md", render_github))
