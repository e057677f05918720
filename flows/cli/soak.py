"""`model-optimizer soak`: run it, print what was found, write it as Markdown beside the JSON."""

import subprocess
import sys
from pathlib import Path

import typer

from flows.bootstrap import prepare_environment
from flows.progress import terminal
from flows.soak_page import PAGE, conclude, write_page
from flows.soak_request import SoakOptions, read_soak_request
from model_optimizer.measurement.gpu import nsys_command
from model_optimizer.verification.soak_report import write_report

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
    page = write_page(report, request.folder)
    typer.echo(report.model_dump_json(indent=1) if as_json else page)
    conclude(report, request.folder / PAGE)


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
