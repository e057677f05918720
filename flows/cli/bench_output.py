"""How `bench` shows what it does and what it found: a live line, tables, CSV."""

import csv
import io
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from model_optimizer.measurement.bench_report import BenchReport, LoadResult, Percentile
from model_optimizer.measurement.openloop import Snapshot
from model_optimizer.measurement.saturation import Sweep
from model_optimizer.reporting.text import label, number
from model_optimizer.store import write_atomically

_REDRAW_S = 0.5
"""Drawing takes the generator's own time."""


class LiveProgress:
    """An Observer that draws one line in a terminal, and nothing elsewhere."""

    def __init__(self, title: str):
        console = Console(stderr=True)
        counts = "{task.fields[started]} sent, {task.fields[flight]} in flight, {task.fields[failed]} failed"
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(counts), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
        self._task: TaskID = self._progress.add_task(title, total=None, started=0, flight=0, failed=0)
        self._next = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def rename(self, title: str) -> None:
        """Say what goes on now."""
        self._progress.update(self._task, description=title)

    def tick(self, snapshot: Snapshot) -> bool:
        """Draw twice a second; never end the run."""
        if self._progress.disable or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _REDRAW_S
        self._progress.update(
            self._task,
            total=snapshot.num_planned,
            completed=snapshot.num_finished,
            started=snapshot.num_started,
            flight=snapshot.num_started - snapshot.num_finished,
            failed=snapshot.num_failed,
        )
        self._progress.refresh()
        return False


def print_report(report: BenchReport) -> None:
    """Print figures as tables, and in sentences what they do not say."""
    console = Console(highlight=False)
    console.print(f"{report.model} at {report.target}: {report.arrivals}; {report.lengths}", markup=False, style="bold")
    if report.load is not None:
        _print_load(report.load, console)
    if report.sweep is not None:
        _print_sweep(report.sweep, console)
    for limit in report.limits:
        console.print(f"The generator itself was the bottleneck: {limit}.", markup=False, style="bold")
    for note in report.notes:
        console.print(f"note: {note}", style="dim", markup=False)


def load_sentences(load: LoadResult) -> list[str]:
    """Return what a run did, a sentence each."""
    good = load.num_requests - load.num_failed
    said = [f"{good} of {load.num_requests} requests ended well in {number(load.wall_s)} s: {number(load.requests_per_s)}/s."]
    if load.output_tok_per_s is not None:
        said.append(f"{load.output_tokens} tokens, {number(load.output_tok_per_s)}/s, counted by {load.tokens_counted_by}.")
    jitters = [f"{label(it.name)} {number(it.jitter_ms)} ms" for it in load.latency[:-1] if it.jitter_ms is not None]
    if jitters:
        said.append(f"Jitter, P99 less P50: {', '.join(jitters)}.")
    if load.goodput is not None:
        limits = ", ".join(f"{label(name)} {number(limit)}" for name, limit in load.goodput.level.items())
        said.append(
            f"Goodput within {limits}: {100 * load.goodput.ratio:.4g} % of all, {number(load.goodput.requests_per_s)} requests/s."
        )
    said += [f"{count} failed: {reason}." for reason, count in load.failures.items()]
    if load.first_fault:
        said.append(f"The first one was told: {load.first_fault}")
    return said


def _print_load(load: LoadResult, console: Console) -> None:
    table = Table(title="latency in ms, with 95 % intervals", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for it in load.latency[0].percentiles:
        table.add_column(it.name, justify="right", no_wrap=True)
    for figure in load.latency:
        cells = [_percentile(it) for it in figure.percentiles]
        table.add_row(f"{label(figure.name)}\n[dim]n {figure.num_samples}[/]", *cells)
    console.print(table)
    for sentence in load_sentences(load):
        console.print(sentence, markup=False)
    health = load.health
    waited = "" if health.waited_ratio is None else f", waited {100 * health.waited_ratio:.3g} % of the time for one"
    console.print(f"generator: {100 * health.cpu_ratio:.3g} % of a core{waited}", style="dim")


def _percentile(it: Percentile) -> str:
    value = "failed" if it.value is None else number(it.value)
    if it.lower is None and it.upper is None:
        return value
    bounds = ["…" if bound is None else number(bound) for bound in (it.lower, it.upper)]
    return f"{value}\n[dim]{bounds[0]}–{bounds[1]}[/]"


def _print_sweep(sweep: Sweep, console: Console) -> None:
    table = Table(title=f"rates; one request alone takes {number(sweep.base_ms)} ms", title_justify="left", box=box.SIMPLE)
    for name in ("offered/s", "served/s", "n", "failed", "P50 ms", "P99 ms", "TTFT P99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for it in sorted(sweep.points, key=lambda point: point.offered_per_s):
        values = ["–" if value is None else number(value) for value in (it.p50_ms, it.p99_ms, it.ttft_p99_ms)]
        counts = (number(it.offered_per_s), number(it.finished_per_s), str(it.num_requests), str(it.num_failed))
        word = "full" if it.over_capacity else "late" if it.limits else ""
        table.add_row(*counts, *values, word)
    console.print(table)
    sustained = "none" if sweep.sustained_per_s is None else f"{number(sweep.sustained_per_s)} requests/s"
    capacity = "not reached" if sweep.capacity_per_s is None else f"{number(sweep.capacity_per_s)} requests/s"
    if any(it.limits for it in sweep.points):
        console.print("late: the generator was, so these latencies are not the server's alone; rates hold.", style="dim")
    console.print(f"Highest rate kept up with: {sustained}. Capacity: {capacity}.")
    console.print(f"Ended: {sweep.ended_because}.", markup=False)


def write_csv(report: BenchReport, path: Path) -> None:
    """Write one row per figure: name, statistic, value, lower, upper, unit, n."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("name", "statistic", "value", "lower", "upper", "unit", "n"))
    if report.load is not None:
        load = report.load
        for name, value in (("requests_per_s", load.requests_per_s), ("output_tok_per_s", load.output_tok_per_s)):
            writer.writerow((name, "", value, "", "", "per_s", load.num_requests))
        writer.writerow(("failed", "", load.num_failed, "", "", "count", load.num_requests))
        for figure in load.latency:
            writer.writerow((figure.name, "mean", figure.mean_ms, "", "", "ms", figure.num_samples))
            for it in figure.percentiles:
                writer.writerow((figure.name, it.name, it.value, it.lower, it.upper, "ms", figure.num_samples))
    if report.sweep is not None:
        for point in report.sweep.points:
            case = f"{point.offered_per_s:.6g}_per_s"
            writer.writerow((case, "finished_per_s", point.finished_per_s, "", "", "per_s", point.num_requests))
            for name, value in (("p50", point.p50_ms), ("p99", point.p99_ms), ("ttft_p99", point.ttft_p99_ms)):
                writer.writerow((case, name, value, "", "", "ms", point.num_requests))
        writer.writerow(("sustained", "", report.sweep.sustained_per_s, "", "", "per_s", ""))
        writer.writerow(("capacity", "", report.sweep.capacity_per_s, "", "", "per_s", ""))
    write_atomically(path, stream.getvalue().encode())
