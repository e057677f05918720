"""How a run ended, in a few figures: for the terminal, for machines, and for the flow's last state."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from model_optimizer.artifacts.base import Stored
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import Release
from model_optimizer.artifacts.report import Report
from model_optimizer.errors import GateFailed, Inconclusive
from model_optimizer.reporting.summary import COLUMNS, verdict_table
from model_optimizer.store import write_atomically

COLOURS = {Verdict.ACCEPT: "green", Verdict.REJECT: "red", Verdict.INCONCLUSIVE: "yellow"}
TEXT_COLUMNS = 2


@dataclass(frozen=True)
class Outcome:
    """What the run released and what it thinks of it."""

    bundle: Path
    release: Release
    report: Report
    cached: dict[str, bool]
    """Stage -> whether its result was in the store already."""

    @classmethod
    def read(cls, bundles: Path, release: Stored[Release], cached: dict[str, bool]) -> "Outcome":
        """Read the report back from the bundle that was released."""
        bundle = bundles / release.artifact.bundle
        report = Report.model_validate_json((bundle / "metrics" / "report.json").read_bytes())
        return cls(bundle, release.artifact, report, cached)

    @property
    def report_page(self) -> Path:
        return self.bundle / "metrics" / "report.html"

    def document(self) -> dict[str, object]:
        """Return the machine-readable form that `--json` prints."""
        figures = self.report.figures
        return {
            "name": self.report.name,
            "verdict": self.report.verdict.value,
            "dimensions": {dimension.value: verdict.value for dimension, verdict in self.report.dimensions.items()},
            "headline": self.report.headline,
            "bundle": str(self.bundle),
            "report": str(self.report_page),
            "manifest_sha256": self.release.manifest_sha256,
            "decision": self.release.decision,
            "level": self.release.level,
            "stages": self.cached,
            "rounds": [row.document() for row in self.report.rounds],
            "ratios": {
                "size": figures.size_ratio,
                "speed": figures.speed_ratio,
                "speed_lower": figures.speed_ratio_lower,
                "speed_upper": figures.speed_ratio_upper,
                "speed_n": self._num_pairs(),
            },
        }

    def _num_pairs(self) -> int | None:
        """Return how many interleaved rounds the speed ratio rests on."""
        released = self.report.compiled.strategy
        scanned = next((row.measures for row in self.report.front.candidates if row.strategy == released and row.measures), None)
        name, measures = ("generation_throughput", scanned) if scanned else ("speed_ratio", self.report.verification.measures)
        return next((measure.num_samples for measure in measures if measure.name == name), None)

    def keep(self, path: Path) -> None:
        """Write the machine-readable form, for the command line and for later comparison."""
        write_document(path, self.document())

    def conclude(self) -> None:
        """Return for an accepted run.

        Raises:
            GateFailed: a gate rejected, or (Inconclusive) could not decide.
        """
        verdicts = ", ".join(f"{dimension} {verdict}" for dimension, verdict in self.report.dimensions.items())
        message = f"{self.report.name}: {self.report.verdict} ({verdicts}); report {self.report_page}"
        if self.report.verdict is Verdict.REJECT:
            raise GateFailed(message, self.report_page)
        if self.report.verdict is Verdict.INCONCLUSIVE:
            raise Inconclusive(message, self.report_page)

    def draw(self, console: Console) -> None:
        """Print the verdict table and where report and bundle lie."""
        summary = verdict_table(self.report)
        table = Table(title=summary.title, title_style=f"bold {COLOURS[summary.verdict]}", caption=summary.headline)
        for index, column in enumerate(COLUMNS):
            table.add_column(column, justify="left" if index < TEXT_COLUMNS else "right")
        for row in summary.rows:
            *cells, verdict = row.cells()
            table.add_row(*cells, f"[{COLOURS[row.verdict]}]{verdict}[/]")
        console.print(table)
        console.print(f"report  {self.report_page}", highlight=False, soft_wrap=True)
        console.print(f"bundle  {self.bundle}  ({self.release.decision}, {self.release.level})", highlight=False, soft_wrap=True)


def partial_document(name: str, cached: dict[str, bool]) -> dict[str, object]:
    """Return the machine-readable form of a run that ended early because it was asked to: no verdict, no bundle."""
    return {"name": name, "verdict": None, "stages": cached}


def write_document(path: Path, document: dict[str, object]) -> None:
    """Write the machine-readable outcome of a run."""
    write_atomically(path, json.dumps(document, indent=1, ensure_ascii=False).encode())
