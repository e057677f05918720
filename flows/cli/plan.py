"""`model-optimizer plan`: how far the store already goes, and what the rest would take."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import typer
from rich.console import Console
from rich.table import Table

from flows.bootstrap import home
from flows.cli.github import GithubFiles, run_link
from flows.estimate import Estimate, estimate_run
from flows.prepare import Request, read_request, source_commit
from model_optimizer.artifacts.base import Stage
from model_optimizer.errors import UnsupportedError
from model_optimizer.profile import load_profile
from model_optimizer.reporting.text import duration, number, size

TO_RUN, HELD = "to run", "in the store"
SHOWN_CANDIDATES = 12


@dataclass(frozen=True)
class PlanRow:
    """One stage: in the store (and when it was made), to be run, or behind a stage that must run first."""

    stage: str
    state: str
    round: int = 0
    key: str = ""
    made_at: str = ""
    took_s: float | None = None
    estimate_s: float | None = None
    """What it would take; None where it is held or nothing tells it."""


@dataclass(frozen=True)
class Plan:
    """What a run of the profile would do here."""

    profile: str
    name: str
    model: str
    revision: str
    commit: str
    rows: tuple[PlanRow, ...]
    estimate: Estimate
    warnings: tuple[str, ...]

    def document(self) -> dict[str, object]:
        """Return the machine-readable form."""
        estimate = self.estimate
        return {
            "profile": self.profile,
            "name": self.name,
            "model": self.model,
            "revision": self.revision,
            "commit": self.commit,
            "stages": [asdict(row) for row in self.rows],
            "estimate": {
                "wall_s": estimate.total_s,
                "wall_lower_s": None if estimate.total_s is None else estimate.total_s / estimate.spread,
                "wall_upper_s": None if estimate.total_s is None else estimate.total_s * estimate.spread,
                "memory_bytes": estimate.memory_bytes,
                "disk_bytes": estimate.disk_bytes,
                "cost_usd": estimate.cost_usd,
                "basis": estimate.basis,
                "candidates": estimate.candidates,
            },
            "warnings": self.warnings,
        }

    def figures(self) -> list[tuple[str, str]]:
        """Return the estimate as (what, value) texts."""
        estimate, total = self.estimate, self.estimate.total_s
        if total is None and any(row.state != HELD for row in self.rows):
            return [("estimate", f"none: {estimate.basis}")]
        if total is None:
            return [("time", "about a minute: every stage is in the store")]
        spread = f"{rough(total / estimate.spread)} to {rough(total * estimate.spread)}"
        rows = [("time", f"about {rough(total)} ({spread}), scaled from {estimate.basis}")]
        if estimate.memory_bytes:
            rows.append(("memory", f"about {size(estimate.memory_bytes)} at the peak"))
        if estimate.disk_bytes is not None:
            rows.append(("disk", f"about {size(estimate.disk_bytes)} in store and bundles"))
        cost = "not known: the profile states no cost.machine_usd_per_hour"
        rows.append(("cost", cost if estimate.cost_usd is None else f"about {number(estimate.cost_usd)} USD of machine time"))
        shown = estimate.candidates[:SHOWN_CANDIDATES]
        rest = len(estimate.candidates) - len(shown)
        if Stage.SCAN.value in estimate.wall_s:
            more = f" and {rest} more" if rest else ""
            rows.append(("candidates", f"{len(estimate.candidates)}: {', '.join(shown)}{more}"))
        return rows


def plan_profile(profile: Path, overrides: tuple[str, ...], *, as_json: bool, github: Path | None = None) -> None:
    """Print one row per stage and what the run would take; start and write nothing but the files for a workflow.

    Raises:
        ConfigError: the profile or something that it names is wrong.
        UnsupportedError: no machine can do what it asks for.
    """
    with GithubFiles(github, profile, "plan") as files:
        plan = make_plan(profile, overrides)
        if github is not None:
            text = plan_markdown(plan)
            files.summary, files.comment = text, files.marker.encode() + b"\n\n" + text
            files.outputs["to-run"] = str(sum(row.state != HELD for row in plan.rows))
        if as_json:
            typer.echo(json.dumps(plan.document(), indent=1))
        else:
            _draw(plan)


def make_plan(profile: Path, overrides: tuple[str, ...]) -> Plan:
    """Return the plan; on a machine other than the profile's target all else is checked, and that is said."""
    request, warnings = _request(profile, overrides)
    rows = _rows(request)
    to_run = tuple(dict.fromkeys(Stage(row.stage) for row in rows if row.state != HELD))
    estimate = estimate_run(request, home(), to_run)
    timed = tuple(row if row.state == HELD else replace(row, estimate_s=estimate.wall_s.get(row.stage)) for row in rows)
    model = request.profile.model
    return Plan(
        profile=str(profile),
        name=request.profile.name,
        model=model.ref,
        revision=model.revision or "",
        commit=source_commit(request.base),
        rows=timed,
        estimate=estimate,
        warnings=(*warnings, *_shortages(estimate, here=not warnings)),
    )


def plan_markdown(plan: Plan) -> bytes:
    """Return the plan for a job summary or a comment."""
    from model_optimizer.reporting.formats.github import COMMENT_LIMIT_BYTES, STEP_ROOM_BYTES, neutral, truncate
    from model_optimizer.reporting.markup import cell, table

    rows = [
        (row.stage + (f", round {row.round}" if row.round else ""), row.state, row.made_at, _took(row), row.key[:12])
        for row in plan.rows
    ]
    revision = f" at {plan.revision}" if plan.revision else ""
    parts = [
        f"## Plan for {cell(plan.profile)}\n",
        f"{cell(plan.name)}: {cell(plan.model + revision)}, commit {cell(plan.commit[:12])}\n",
        *(f"**{cell(warning)}**\n" for warning in plan.warnings),
        table(("a run would take", ""), plan.figures()),
        _without_empty_columns(("stage", "state", "made at", "took / would take", "key"), rows),
    ]
    text = neutral("\n".join(parts)) + run_link("\n") + "\n"
    return truncate(text, COMMENT_LIMIT_BYTES - STEP_ROOM_BYTES, "model-optimizer plan prints all of it.")


def _without_empty_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from model_optimizer.reporting.markup import table

    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    return table([columns[index] for index in kept], [[row[index] for index in kept] for row in rows])


def _request(profile: Path, overrides: tuple[str, ...]) -> tuple[Request, tuple[str, ...]]:
    """Return the checked request; where the target is another machine, all but the target is checked here."""
    from model_optimizer.hardware.catalogue import probe_kind

    stated = load_profile(profile, overrides)
    try:
        probe_kind(stated.target.hardware)
    except UnsupportedError as error:
        here = ("target.hardware=auto", "target.framework=null", "target.python=null")
        warning = f"Checked on another machine than the target, whose store and framework are not known here: {error}"
        return read_request(profile, (*overrides, *here)), (warning,)
    return read_request(profile, overrides), ()


def _rows(request: Request) -> list[PlanRow]:
    """Walk the stages as far as their results are held."""
    from flows.walk import held_stages

    rows = []
    for step in held_stages(request, home() / "store"):
        if step.stored is None:
            rows.append(PlanRow(step.stage.value, TO_RUN, step.round, step.key))
            break
        made = step.stored.produced
        rows.append(PlanRow(step.stage.value, HELD, step.round, step.key, made.started_at, made.wall_s))
    known = {row.stage for row in rows}
    return rows + [PlanRow(stage.value, f"{TO_RUN}, after the stage before") for stage in Stage if stage.value not in known]


def _shortages(estimate: Estimate, *, here: bool) -> tuple[str, ...]:
    """Return what this machine has too little of, where the run would be here."""
    found = []
    if here and estimate.memory_bytes and estimate.memory_bytes > (total := psutil.virtual_memory().total):
        found.append(f"The run may need {size(estimate.memory_bytes)} of memory, and this machine has {size(total)}")
    place = home() if home().is_dir() else Path.cwd()
    if here and estimate.disk_bytes and estimate.disk_bytes > (free := shutil.disk_usage(place).free):
        found.append(f"The run may need {size(estimate.disk_bytes)} of disk, and {size(free)} are free")
    return tuple(found)


def _took(row: PlanRow) -> str:
    if row.took_s is not None:
        return f"took {duration(row.took_s)}"
    if row.estimate_s is None:
        return ""
    return f"about {rough(row.estimate_s)}" if row.estimate_s else "with the scan"


def rough(seconds: float) -> str:
    """Return a time as exactly as an estimate is known: `20 s`, `16 min`, `26 h`."""
    if seconds < 100:
        return f"{max(1, round(seconds, -1 if seconds > 20 else 0)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.0f} h"


def _draw(plan: Plan) -> None:
    table = Table(title=f"plan for {plan.profile}")
    for column in ("stage", "state", "made at", "took / would take", "key"):
        table.add_column(column)
    for row in plan.rows:
        stage = f"{row.stage}, round {row.round}" if row.round else row.stage
        table.add_row(stage, row.state, row.made_at, _took(row), row.key[:12])
    console = Console()
    console.print(table)
    for what, value in plan.figures():
        console.print(f"{what:<11} {value}", highlight=False, markup=False, soft_wrap=True)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False, soft_wrap=True)
