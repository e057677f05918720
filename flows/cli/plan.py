"""`model-optimizer plan`: how far the store already goes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from flows.bootstrap import home
from flows.prepare import read_request
from model_optimizer.artifacts.base import Stage


@dataclass(frozen=True)
class PlanRow:
    """One stage: in the store (and when it was made), to be run, or behind a stage that must run first."""

    stage: str
    state: str
    round: int = 0
    key: str = ""
    made_at: str = ""
    took_s: float | None = None


def plan_profile(profile: Path, overrides: tuple[str, ...], *, as_json: bool) -> None:
    """Print one row per stage; start and write nothing."""
    rows = _rows(profile, overrides)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table(title=f"plan for {profile}")
    for column in ("stage", "state", "made at", "took", "key"):
        table.add_column(column)
    for row in rows:
        stage = f"{row.stage}, round {row.round}" if row.round else row.stage
        table.add_row(stage, row.state, row.made_at, "" if row.took_s is None else f"{row.took_s:.1f} s", row.key[:12])
    Console().print(table)


def _rows(profile: Path, overrides: tuple[str, ...]) -> list[PlanRow]:
    """Walk the stages as far as their results are held."""
    from flows.walk import held_stages

    request = read_request(profile, overrides)
    rows = []
    for step in held_stages(request, home() / "store"):
        if step.stored is None:
            rows.append(PlanRow(step.stage.value, "to run", step.round, step.key))
            break
        made = step.stored.produced
        rows.append(PlanRow(step.stage.value, "in the store", step.round, step.key, made.started_at, made.wall_s))
    known = {row.stage for row in rows}
    return rows + [PlanRow(stage.value, "to run, after the stage before") for stage in Stage if stage.value not in known]
