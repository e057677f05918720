"""The verdict in a few rows: for the terminal's last table and for Prefect's artifact."""

from dataclasses import dataclass

from model_optimizer.artifacts.measure import Dimension, Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.markup import cell, table, verdict_words
from model_optimizer.reporting.rounds import has_rounds
from model_optimizer.reporting.tables import measure_rows
from model_optimizer.reporting.text import label

COLUMNS = ("dimension", "measure", "value", "baseline", "change", "95 % interval", "limit", "verdict")


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One gate, or a dimension that has none (then `measure` is empty)."""

    dimension: str
    measure: str
    value: str
    baseline: str
    change: str
    interval: str
    limit: str
    verdict: Verdict

    def cells(self) -> tuple[str, ...]:
        """Return the texts in the order of COLUMNS."""
        return (
            self.dimension, self.measure, self.value, self.baseline, self.change, self.interval, self.limit, self.verdict.value,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class VerdictTable:
    """What a terminal shows at the end of a run."""

    title: str
    verdict: Verdict
    headline: str
    rows: tuple[SummaryRow, ...]


def verdict_table(report: Report) -> VerdictTable:
    """Return the verdict, the headline and one row per gate, in the order of the dimensions."""
    rows: list[SummaryRow] = []
    for dimension in Dimension:
        if dimension not in report.dimensions:
            continue
        gates = [row for row in measure_rows(report, dimension) if row.verdict is not None]
        for row in gates:
            assert row.verdict is not None
            figures = (row.value, row.baseline, row.change, row.interval, row.limit)
            rows.append(SummaryRow(dimension.value, row.name, *figures, row.verdict))
        if not gates:
            rows.append(SummaryRow(dimension.value, "", "–", "–", "–", "–", "–", report.dimensions[dimension]))
    tried = f" after {len(report.rounds)} rounds" if has_rounds(report) else ""
    return VerdictTable(
        title=f"{report.name}: {report.verdict}{tried}", verdict=report.verdict, headline=report.headline, rows=tuple(rows)
    )


def verdict_markdown(report: Report) -> str:
    """Return the verdict table as Markdown."""
    summary = verdict_table(report)
    rows = [(*row.cells()[:-1], verdict_words(row.verdict)) for row in summary.rows]
    heading = f"## {verdict_words(summary.verdict)}: {cell(label(report.name))}"
    heading += f" after {len(report.rounds)} rounds" if has_rounds(report) else ""
    return f"{heading}\n\n{cell(summary.headline)}\n\n{table(COLUMNS, rows)}"
