"""`model-optimizer compare`: two runs side by side."""

import itertools
import json
from pathlib import Path

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from flows.bootstrap import home
from model_optimizer.artifacts.report import Report
from model_optimizer.errors import ConfigError
from model_optimizer.reporting.compare import Comparison, Pair, compare_reports, pair_cells
from model_optimizer.reporting.text import label

NAME_CHARACTERS = 8
"""A run's id may be shortened to as many of its first characters."""


def compare_runs(first: str, second: str, *, as_json: bool) -> None:
    """Print verdict, strategy and every figure that both runs have, and the difference.

    Raises:
        ConfigError: no such run or bundle, or one without a report.
    """
    folders = (find_run(first), find_run(second))
    comparison = compare_reports(*(read_report(folder) for folder in folders))
    if as_json:
        typer.echo(json.dumps(document(comparison, folders), indent=1, ensure_ascii=False))
        return
    draw(comparison, (folders[0].name, folders[1].name), Console())


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
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a bundle that a run released") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path} is no report of this version ({where}: {first['msg']}); run its profile again") from error


def draw(comparison: Comparison, names: tuple[str, str], console: Console) -> None:
    """Print what the runs were, the figures that stand on their own, and those against each run's own baseline."""
    facts = Table(title=f"{names[0]} and {names[1]}", title_justify="left")
    for column in ("", *names):
        facts.add_column(column, overflow="fold")
    for fact in comparison.facts:
        style = "" if fact.same else "bold"
        facts.add_row(fact.name, fact.left, fact.right, style=style)
    console.print(facts)
    _draw_figures("figures", comparison.absolute(), names, console)
    same = next(fact.same for fact in comparison.facts if fact.name == "baseline")
    note = "the same strategy in both" if same else "DIFFERENT strategies"
    _draw_figures(f"against each run's own baseline ({note})", comparison.against_baselines(), names, console)
    for name, missing in zip(names, (comparison.only_right, comparison.only_left), strict=True):
        if missing:
            console.print(f"not in {name}: {', '.join(label(it) for it in missing)}", style="dim", highlight=False)
    console.print("apart: the two 95 % intervals do not touch; the runs were not interleaved", style="dim", highlight=False)


def _draw_figures(title: str, pairs: tuple[Pair, ...], names: tuple[str, str], console: Console) -> None:
    """Print the gates and every figure that differs, by dimension; name the others in one line."""
    shown = [pair for pair in pairs if pair.gates or pair.difference]
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


def document(comparison: Comparison, folders: tuple[Path, Path]) -> dict[str, object]:
    """Return the machine-readable form."""
    return {
        "left": str(folders[0]),
        "right": str(folders[1]),
        "facts": {fact.name: {"left": fact.left, "right": fact.right} for fact in comparison.facts},
        "measures": [_pair_document(pair) for pair in comparison.pairs],
        "only_left": list(comparison.only_left),
        "only_right": list(comparison.only_right),
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
