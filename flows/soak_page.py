"""A soak's report for people, and what it means for whoever asked: Markdown beside the JSON, and a raised verdict."""

from collections.abc import Iterator
from pathlib import Path

from model_optimizer.artifacts.measure import Measure, Origin, Verdict
from model_optimizer.errors import GateFailed, Inconclusive
from model_optimizer.store import write_atomically
from model_optimizer.verification.soak_report import SoakReport

PAGE = "soak.md"


def write_page(report: SoakReport, folder: Path) -> str:
    """Write the page beside the report; return it."""
    page = "\n".join(page_lines(report)) + "\n"
    write_atomically(folder / PAGE, page.encode())
    return page


def conclude(report: SoakReport, page: Path) -> None:
    """Return for an accepted soak.

    Raises:
        GateFailed: a gate rejected, or (Inconclusive) could not decide.
    """
    names = {verdict: [it.name for it in report.measures if it.verdict is verdict] for verdict in Verdict}
    if report.verdict is Verdict.REJECT:
        raise GateFailed(f"the soak found faults: {', '.join(names[Verdict.REJECT])}; see {page}", page)
    if report.verdict is Verdict.INCONCLUSIVE:
        raise Inconclusive(f"the soak was too short to decide on {', '.join(names[Verdict.INCONCLUSIVE])}; see {page}", page)


def page_lines(report: SoakReport) -> Iterator[str]:
    """Yield the report as Markdown."""
    soak = report.soak
    yield f"# Soak of {report.subject}: {report.verdict} ({report.level})"
    yield ""
    yield (
        f"{soak.ran_s / 3600:.2f} h really run of {report.required_s / 3600:g} h that a final verdict needs; "
        f"{soak.num_requests:,} requests, {soak.num_tokens:,} tokens, {soak.num_segments} segments in {soak.num_sessions} "
        f"process{'es' * (soak.num_sessions != 1)}; {report.engine} on {report.machine}."
    )
    if soak.gap_s:
        yield f"\nNot tested: {soak.gap_s:.0f} s between processes."
    if soak.stopped_because:
        yield f"\nStopped early: {soak.stopped_because}."
    if report.not_accelerated:
        yield f"\nAccelerated: it stands for the requests of {soak.equivalent_s / 3600:.3g} h. Not brought forward by that:"
        yield from (f"- {item}" for item in report.not_accelerated)
    yield ""
    yield "| measure | value | limit | interval | n | verdict | |"
    yield "|---|---|---|---|---|---|---|"
    yield from (_row(measure) for measure in report.measures)
    yield from ("", *report.notes)


def _row(measure: Measure) -> str:
    value = (
        "not measured"
        if measure.origin is Origin.NOT_MEASURED or measure.value is None
        else f"{measure.value:.6g} {measure.unit}"
    )
    limit = "" if measure.limit is None else f"{measure.limit:.6g}"
    interval = "" if measure.interval is None else f"{measure.interval.lower:.4g} .. {measure.interval.upper:.4g}"
    count = "" if measure.num_samples is None else f"{measure.num_samples:,}"
    return f"| {measure.name} | {value} | {limit} | {interval} | {count} | {measure.verdict or 'shown'} | {measure.reason} |"
