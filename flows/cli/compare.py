"""`model-optimizer compare`: two runs side by side."""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from pydantic import JsonValue, ValidationError
from rich.console import Console
from rich.table import Table

from flows.bootstrap import home
from model_optimizer.artifacts.report import Report
from model_optimizer.errors import ConfigError
from model_optimizer.reporting.compare import Comparison, Fact, Gate, Pair, compare_reports, gate_cells, pair_cells
from model_optimizer.reporting.text import label
from model_optimizer.store import write_atomically

NAME_CHARACTERS = 8
"""A run's id may be shortened to as many of its first characters."""

MLFLOW_ID = re.compile("[0-9a-f]{32}")
GOLDEN = "golden set "
"""How a bundle's provenance names a golden set among what it was made from."""


@dataclass(frozen=True)
class Subject:
    """One of the two runs."""

    name: str
    place: str
    """Directory of its bundle, or `mlflow:<run id>`."""
    report: Report
    golden: dict[str, str]
    """Golden set -> digest; empty where it is not known."""


def compare_runs(first: str, second: str, *, as_json: bool, page: Path | None = None) -> None:
    """Print verdict, strategy, gates and every figure that both runs have, and the difference; `page` is written beside that.

    Raises:
        ConfigError: no such run or bundle, or one without a report.
        StorageError: the page cannot be written.
    """
    subjects = (find_subject(first), find_subject(second))
    left, right = subjects
    comparison = with_golden_digests(compare_reports(left.report, right.report), left, right)
    names = (left.name, right.name) if left.name != right.name else (f"{left.name} (left)", f"{right.name} (right)")
    if page is not None:
        from model_optimizer.reporting.compare_page import render_comparison

        write_atomically(page, render_comparison(comparison, (left.report, right.report), names))
    if as_json:
        typer.echo(json.dumps(document(comparison, (left.place, right.place)), indent=1, ensure_ascii=False))
        return
    draw(comparison, names, Console())
    if page is not None:
        typer.echo(f"page  {page}")


def find_subject(name: str) -> Subject:
    """Return a run by bundle directory, bundle name, the run's id, or the id of its parent run in MLflow.

    Raises:
        ConfigError: there is none, it ended before its release, or its report is of another version.
    """
    if MLFLOW_ID.fullmatch(name) and not (Path(name).exists() or (home() / "bundles" / name).exists()):
        return _from_mlflow(name)
    bundle = find_run(name)
    return Subject(bundle.name, str(bundle), read_report(bundle), _golden_digests(bundle))


def _from_mlflow(run_id: str) -> Subject:
    """Return a run whose bundle may lie on another machine: its report is among its files in MLflow."""
    from tasks.tracking_server import MlflowServer, Refused, Unreachable, tracking_uri

    server = MlflowServer(tracking_uri(home()), home())
    try:
        run = server.fetch(run_id, "report.json")
    except (Refused, Unreachable) as error:
        raise ConfigError(f"MLflow at {server.uri} has no run {run_id} to compare: {error}") from error
    if run.text is None:
        raise ConfigError(f"MLflow run {run_id} holds no report.json; name the parent run of a run that came to its release")
    return Subject(
        run.name, f"mlflow:{run_id}", parse_report(run.text.encode(), f"report.json of MLflow run {run_id}"), run.datasets
    )


def find_run(name: str) -> Path:
    """Return the bundle of a run: by directory, by bundle name, or by the run's id.

    Raises:
        ConfigError: there is none, or the run ended before it released one.
    """
    for folder in (Path(name), home() / "bundles" / name):
        if (folder / "manifest.json").is_file():
            return folder.resolve()
    runs = home() / "runs"
    found = [path for path in runs.glob("*.json") if path.stem == name or path.stem.startswith(name)] if name else []
    if len(found) != 1 or (len(name) < NAME_CHARACTERS and found[0].stem != name):
        known = ", ".join(sorted(path.parent.name for path in (home() / "bundles").glob("*/manifest.json"))) or "none"
        what = f"{len(found)} runs begin with {name!r}" if len(found) > 1 else f"no bundle or run {name!r}"
        raise ConfigError(f"{what} here, in {home() / 'bundles'} or in {runs}; bundles: {known}")
    bundle = json.loads(found[0].read_bytes()).get("bundle")
    if bundle is None:
        raise ConfigError(f"run {found[0].stem} ended before its release, so there is no report; run it to the end")
    return Path(bundle)


def read_report(bundle: Path) -> Report:
    """Return a bundle's report.

    Raises:
        ConfigError: it holds none, as the baseline's bundle does not, or one of another version.
    """
    path = bundle / "metrics" / "report.json"
    try:
        return parse_report(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a bundle that a run released") from error


def parse_report(content: bytes, place: str) -> Report:
    """Return a report.

    Raises:
        ConfigError: it is one of another version.
    """
    try:
        return Report.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{place} is no report of this version ({where}: {first['msg']}); run its profile again") from error


def with_golden_digests(comparison: Comparison, left: Subject, right: Subject) -> Comparison:
    """Add the doubt that only digests can raise: golden sets of one name whose items differ."""
    changed = [name for name, digest in left.golden.items() if not _same_digest(digest, right.golden.get(name, digest))]
    if not changed:
        return comparison
    doubt = f"golden sets of the same name with other items ({', '.join(sorted(changed))}): accuracies are not comparable"
    return replace(comparison, warnings=(doubt, *comparison.warnings))


def _same_digest(one: str, other: str) -> bool:
    """MLflow keeps the beginning of a digest."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _golden_digests(bundle: Path) -> dict[str, str]:
    """Return the golden sets that a bundle's provenance names; none where it has no provenance that can be read."""
    try:
        document = json.loads((bundle / "provenance.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return {name.removeprefix(GOLDEN): digest for name, digest in _named_digests(document) if name.startswith(GOLDEN)}


def _named_digests(document: JsonValue) -> Iterator[tuple[str, str]]:
    """Yield (name, sha256) of every resource that an in-toto statement describes, wherever it stands."""
    match document:
        case {"name": str(name), "digest": {"sha256": str(digest)}}:
            yield name, digest
        case dict():
            for value in document.values():
                yield from _named_digests(value)
        case list():
            for value in document:
                yield from _named_digests(value)


def draw(comparison: Comparison, names: tuple[str, str], console: Console) -> None:
    """Print doubts, what the runs were, the gates, the figures that stand on their own, and those against each run's baseline."""
    for doubt in comparison.warnings:
        console.print(f"[yellow]not comparable:[/] {doubt}", highlight=False)
    _draw_facts(f"{names[0]} and {names[1]}", comparison.facts, names, console)
    _draw_gates(comparison.gates, names, console)
    _draw_figures("figures", _not_gating(comparison.absolute()), names, console)
    same = next(fact.same for fact in comparison.facts if fact.name == "baseline")
    note = "the same strategy in both" if same else "DIFFERENT strategies"
    _draw_figures(f"against each run's own baseline ({note})", _not_gating(comparison.against_baselines()), names, console)
    for title, facts in (("strategy", comparison.strategy), ("surroundings", comparison.environment)):
        _draw_facts(f"{title}: what differs", tuple(fact for fact in facts if not fact.same), names, console)
    for name, missing in zip(names, (comparison.only_right, comparison.only_left), strict=True):
        if missing:
            console.print(f"not in {name}: {', '.join(label(it) for it in missing)}", style="dim", highlight=False)
    console.print("apart: the two 95 % intervals do not touch; the runs were not interleaved", style="dim", highlight=False)


def _not_gating(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    return tuple(pair for pair in pairs if not pair.gates)


def _draw_facts(title: str, facts: tuple[Fact, ...], names: tuple[str, str], console: Console) -> None:
    if not facts:
        return
    table = Table(title=title, title_justify="left")
    for column in ("", *names):
        table.add_column(column, overflow="fold")
    for fact in facts:
        table.add_row(fact.name, fact.left, fact.right, style="" if fact.same else "bold")
    console.print(table)


def _draw_gates(gates: tuple[Gate, ...], names: tuple[str, str], console: Console) -> None:
    if not gates:
        return
    table = Table(title="gates", title_justify="left")
    table.add_column("measure")
    for column in (*names, "difference", "95 % interval"):
        table.add_column(column, justify="right", overflow="fold")
    for dimension, members in itertools.groupby(gates, key=lambda gate: gate.dimension):
        table.add_section()
        table.add_row(f"[bold]{dimension}[/]")
        for gate in members:
            table.add_row(*gate_cells(gate))
    console.print(table)


def _draw_figures(title: str, pairs: tuple[Pair, ...], names: tuple[str, str], console: Console) -> None:
    """Print every figure that differs, by dimension; name the others in one line."""
    shown = [pair for pair in pairs if pair.difference]
    if shown:
        table = Table(title=title, title_justify="left")
        table.add_column("measure")
        for column in (*names, "difference", "apart"):
            table.add_column(column, justify="right", overflow="fold")
        for dimension, members in itertools.groupby(shown, key=lambda pair: pair.left.dimension):
            table.add_section()
            table.add_row(f"[bold]{dimension}[/]")
            for pair in members:
                table.add_row(*pair_cells(pair), style="bold" if pair.apart else "")
        console.print(table)
    alike = [label(pair.left.name) for pair in pairs if pair not in shown]
    if alike:
        console.print(f"the same in both: {', '.join(alike)}", style="dim", highlight=False)


def document(comparison: Comparison, places: tuple[str, str]) -> dict[str, object]:
    """Return the machine-readable form."""
    return {
        "left": places[0],
        "right": places[1],
        "comparable": not comparison.warnings,
        "warnings": list(comparison.warnings),
        "facts": _fact_documents(comparison.facts),
        "gates": [_gate_document(gate) for gate in comparison.gates],
        "strategy": _fact_documents(comparison.strategy),
        "environment": _fact_documents(comparison.environment),
        "measures": [_pair_document(pair) for pair in comparison.pairs],
        "only_left": list(comparison.only_left),
        "only_right": list(comparison.only_right),
    }


def _fact_documents(facts: tuple[Fact, ...]) -> dict[str, object]:
    return {fact.name: {"left": fact.left, "right": fact.right} for fact in facts}


def _gate_document(gate: Gate) -> dict[str, object]:
    pair = gate.pair
    interval = pair.difference_interval if pair else None
    return {
        "name": gate.name,
        "dimension": gate.dimension.value,
        "left": gate.left.model_dump(mode="json") if gate.left else None,
        "right": gate.right.model_dump(mode="json") if gate.right else None,
        "difference": pair.difference if pair else None,
        "difference_interval": interval.model_dump() if interval else None,
    }


def _pair_document(pair: Pair) -> dict[str, object]:
    return {
        "name": pair.left.name,
        "dimension": pair.left.dimension.value,
        "unit": pair.left.unit,
        "left": pair.left.value,
        "right": pair.right.value,
        "difference": pair.difference,
        "ratio": pair.ratio,
        "intervals_apart": pair.apart,
        "against_own_baseline": pair.relative,
        "left_verdict": pair.left.verdict,
        "right_verdict": pair.right.verdict,
    }
