"""`model-optimizer soak`: run it, print what was found, write it as Markdown beside the JSON."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from flows.bootstrap import prepare_environment
from flows.progress import terminal
from flows.soak_request import SoakOptions, read_soak_request
from model_optimizer.artifacts.measure import Measure, Origin, Verdict
from model_optimizer.errors import GateFailed, Inconclusive
from model_optimizer.measurement.gpu import nsys_command
from model_optimizer.store import write_atomically
from model_optimizer.verification.soak_report import SoakReport, write_report

PAGE = "soak.md"
CAPTURE_S = 60


def run_soak_command(options: SoakOptions, *, as_json: bool, captures: bool = False) -> None:
    """Soak in this process's care; the report is printed whatever the verdict. `captures`: also a minute under nsys.

    Raises:
        ConfigError: found before anything is started or written.
        GateFailed: a gate did not accept.
    """
    console = terminal()
    with console.status("reading what is to be soaked"):
        request = read_soak_request(options)
    console.print(f"[bold]{request.name}[/bold]: {request.config.duration:g} s of traffic", highlight=False)
    server = prepare_environment(quiet=True)
    from flows.soak import soak  # takes seconds, while the server starts

    if server:
        server.wait()
    report = soak(options)
    if captures:
        report = report.model_copy(update={"notes": (*report.notes, _capture(options, request.folder))})
        write_report(request.folder, report)
    page = "\n".join(page_lines(report)) + "\n"
    write_atomically(request.folder / PAGE, page.encode())
    typer.echo(report.model_dump_json(indent=1) if as_json else page)
    _conclude(report, request.folder / PAGE)


def _capture(options: SoakOptions, folder: Path) -> str:
    """Soak once more for a minute under Nsight Systems; return what came of it."""
    prefix = nsys_command(folder / "nsys", CAPTURE_S)
    if prefix is None:
        return "No Nsight Systems capture: nsys is not installed here."
    again = ("soak", options.target, "--duration", f"{CAPTURE_S}s", "--no-control", "--output", str(folder / "captured"))
    done = subprocess.run([*prefix, sys.executable, "-m", "flows.cli", *again], capture_output=True, text=True, check=False)
    kept = folder / "nsys.nsys-rep"
    if kept.is_file():
        return f"Nsight Systems capture of {CAPTURE_S} s: {kept.name}."
    return f"No Nsight Systems capture: nsys ended with {done.returncode}: {' '.join(done.stderr.split())[-300:]}"


def _conclude(report: SoakReport, page: Path) -> None:
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
