"""How a run ended, in a few figures: for the terminal, for machines, and for the flow's last state."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from model_optimizer.artifacts.base import Stored
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import Release, SignOff
from model_optimizer.artifacts.report import Report
from model_optimizer.errors import GateFailed, Inconclusive
from model_optimizer.release.signoff import record_path
from model_optimizer.release.terms import next_step, waiting_line
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
    record: SignOff
    """The sign-off record as it stands: a bundle may have been answered for since it was packaged."""

    @classmethod
    def read(cls, bundles: Path, release: Stored[Release], cached: dict[str, bool]) -> "Outcome":
        """Read the report back from the bundle that was released."""
        bundle = bundles / release.artifact.bundle
        report = Report.model_validate_json((bundle / "metrics" / "report.json").read_bytes())
        record = SignOff.model_validate_json(record_path(bundle).read_bytes())
        return cls(bundle, release.artifact, report, cached, record)

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
            "decision": self.record.decision,
            "level": self.record.level,
            "signoff": self._signoff(),
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

    def _signoff(self) -> dict[str, object]:
        """Return who decided what, and for a bundle that waits what is to be done."""
        record, waits = self.record, self.record.decision == "waiting"
        return {
            "decision": record.decision,
            "level": record.level,
            "method": record.method,
            "reviewer": record.reviewer,
            "identity": record.identity,
            "waivers": {waiver.gate: waiver.reason for waiver in record.waivers},
            "comment": record.comment,
            "report_sha256": record.report_sha256,
            "manifest_sha256": record.bundle_manifest_sha256,
            "record": str(record_path(self.bundle)),
            "needs_waivers": list(dict.fromkeys(record.unwaived)) if waits else [],
            "next": next_step(record) if waits else None,
            "waits": waiting_line(record) if waits else None,
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
        """Return for a run that was signed off or that waits for it with every gate accepted.

        Raises:
            GateFailed: a gate rejected, or (Inconclusive) could not decide, and nobody waived it; or a person refused.
        """
        record = self.record
        if record.decision == "signed-off":
            return
        verdicts = ", ".join(f"{dimension} {verdict}" for dimension, verdict in self.report.dimensions.items())
        message = f"{self.report.name}: {self.report.verdict} ({verdicts}); report {self.report_page}"
        if record.decision == "refused" and record.method not in ("automatic", None):
            raise GateFailed(
                f"{record.bundle} was refused by {record.reviewer}: {record.comment or 'no word'}; {message}", self.report_page
            )
        if record.decision == "waiting":
            message += f"; {waiting_line(record)}"
        if self.report.verdict is Verdict.REJECT:
            raise GateFailed(message, self.report_page)
        if self.report.verdict is Verdict.INCONCLUSIVE:
            raise Inconclusive(message, self.report_page)
        if record.decision == "refused":
            raise GateFailed(f"{record.bundle} is refused: {record.comment}; {message}", self.report_page)

    def draw(self, console: Console) -> None:
        """Print the verdict table and where report and bundle lie."""
        draw_verdict(self.report, console)
        console.print(f"report  {self.report_page}", highlight=False, soft_wrap=True)
        console.print(f"bundle  {self.bundle}  ({standing(self.record)})", highlight=False, soft_wrap=True)


def draw_verdict(report: Report, console: Console) -> None:
    """Print the verdict table."""
    summary = verdict_table(report)
    table = Table(title=summary.title, title_style=f"bold {COLOURS[summary.verdict]}", caption=summary.headline)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index < TEXT_COLUMNS else "right")
    for row in summary.rows:
        *cells, verdict = row.cells()
        table.add_row(*cells, f"[{COLOURS[row.verdict]}]{verdict}[/]")
    console.print(table)


def standing(record: SignOff) -> str:
    """Return in a few words what a record says: nothing that waits reads as signed off."""
    if record.decision == "waiting":
        return "NOT signed off: waits for a reviewer"
    by = "" if record.method in ("automatic", None) else f" by {record.reviewer}"
    waived = ", ".join(waiver.gate for waiver in record.waivers)
    return f"{record.decision}, {record.level}{by}" + (f"; waived: {waived}" if waived else "")


def partial_document(name: str, cached: dict[str, bool]) -> dict[str, object]:
    """Return the machine-readable form of a run that ended early because it was asked to: no verdict, no bundle."""
    return {"name": name, "verdict": None, "stages": cached}


def write_document(path: Path, document: dict[str, object]) -> None:
    """Write the machine-readable outcome of a run."""
    write_atomically(path, json.dumps(document, indent=1, ensure_ascii=False).encode())
