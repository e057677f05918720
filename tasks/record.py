"""The record step, done in every run, cached or not, so that a rerun's picture in MLflow and Prefect is whole.

It is no task of its own: a task run costs more requests than all that is recorded here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from model_optimizer.artifacts.base import Produced, Stage, Stored, Tree
from model_optimizer.artifacts.front import Candidate, ParetoFront
from model_optimizer.artifacts.measure import Measure, Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.reporting.markup import cell, table, verdict_words
from model_optimizer.reporting.renderers import RENDERERS
from model_optimizer.reporting.summary import verdict_markdown
from model_optimizer.reporting.tables import figure_rows
from model_optimizer.reporting.text import duration, moment, prose
from tasks.facts import (
    candidate_metrics,
    candidate_model,
    candidate_table,
    gate_metrics,
    golden_datasets,
    headline_metrics,
    metrics_of,
    outcome_params,
    tables_of,
    tables_tag,
)
from tasks.letters import RunRecord, VersionRecord, now_ms
from tasks.tracking import Tracker

AnyStored = Stored[Any]
"""A stored result of any stage."""
FIGURE_COLUMNS = ("measure", "value", "verdict", "limit", "baseline", "change", "95 % interval", "note")
COMMIT_CHARACTERS = 7


@dataclass(frozen=True)
class RunIdentity:
    """What every record of one flow run carries."""

    flow_run_id: str
    name: str
    tags: dict[str, str]

    @property
    def title(self) -> str:
        """Return the commit, which tells the runs of one profile apart in a list as narrow as MLflow's."""
        commit = self.tags.get("git.sha", "unknown")
        return self.name if commit == "unknown" else commit[:COMMIT_CHARACTERS]

    @property
    def is_retry(self) -> bool:
        return self.tags.get("prefect.run_count", "1") not in ("0", "1")


@dataclass(frozen=True)
class Round:
    """Which candidate a stage worked on: the first one is round 0; `strategy` is None before there is a choice."""

    number: int = 0
    strategy: Strategy | None = None

    @property
    def suffix(self) -> str:
        return f"-round{self.number}" if self.number else ""


def open_run(tracker: Tracker, run: RunIdentity) -> None:
    """Open this run's parent, and wait until MLflow has it and what earlier runs could not send."""
    tracker.record(RunRecord(record_id=run.flow_run_id, parent_id=None, name=run.title, tags=run.tags, finished=False))
    tracker.open()


def close_run(tracker: Tracker, run: RunIdentity, report: Report, page: Path, golden: Sequence[Tree] = ()) -> None:
    """Close the parent run with the headline, the gates' figures and the report: what two commits are compared by.

    Its name says commit, verdict and strategy, for MLflow shows names, parameters and metrics side by side, but no tags.
    """
    strategy, summary = report.compiled.strategy, verdict_markdown(report)
    tracker.record(
        RunRecord(
            record_id=run.flow_run_id,
            parent_id=None,
            name=run.title,
            tags=run.tags
            | {
                "mo.verdict": report.verdict.value,
                "mo.strategy": strategy.label,
                "mlflow.runName": f"{run.title} {report.verdict} {strategy.label}",
                "mlflow.note.content": summary,
            },
            params=outcome_params(run.name, report),
            metrics=headline_metrics(report) | gate_metrics(report),
            texts={
                "report.html": page.read_text(encoding="utf-8"),
                "report.md": RENDERERS.get("markdown").render(report).decode(),
                "report.json": report.model_dump_json(),
            },
            model=candidate_model(run.flow_run_id, strategy, run.tags),
            datasets=golden_datasets(golden, report),
            untagged=("mo.failed_because",) if run.is_retry else (),
            failed=report.verdict is not Verdict.ACCEPT,
        )
    )
    create_markdown_artifact(
        f"{summary}\nReport: `{page}`\n", key="verdict", description=f"{run.name}: {report.verdict}, {strategy.label}"
    )


def end_run_early(tracker: Tracker, run: RunIdentity, *, because: str | None = None) -> None:
    """Close the parent run of a run that has no release: asked to end before it, or failed `because` of an error."""
    tags = run.tags if because is None else run.tags | {"mo.failed_because": because}
    tracker.record(RunRecord(record_id=run.flow_run_id, parent_id=None, name=run.title, tags=tags, failed=because is not None))


def record_stage(stage: Stage, results: Mapping[str, AnyStored], tracker: Tracker, run: RunIdentity, round: Round) -> None:
    """Log one stage to MLflow as a child of the run, and show it in the Prefect UI.

    `results` are the stage's results by role (`chosen`, `baseline`); the first one names the run that did the work.
    A stage that a repair runs again is logged once per round.
    """
    first = next(iter(results.values()))
    tables = tables_of(first.artifact)
    started_ms, ended_ms = _span_ms(first.produced) if not first.cached else (None, now_ms())
    tracker.record(
        RunRecord(
            record_id=f"{run.flow_run_id}/{stage}{round.suffix}",
            parent_id=run.flow_run_id,
            name=f"{list(Stage).index(stage) + 1}-{stage}{round.suffix}",
            tags=run.tags
            | {
                "mo.stage": stage.value,
                "mo.round": str(round.number),
                "mo.cached": str(first.cached).lower(),
                "mo.produced_at": first.produced.started_at,
            }
            | {f"mo.key.{role}": stored.key for role, stored in results.items()}
            | tables_tag(list(tables)),
            metrics=metrics_of(first.artifact.measures) | {"resource/stage_wall_s": first.produced.wall_s},
            texts={f"{role}.json": stored.artifact.model_dump_json(indent=1) for role, stored in results.items()}
            | {"explanation.md": explain(stage.value, results)}
            | tables,
            model=candidate_model(run.flow_run_id, round.strategy, run.tags) if round.strategy else None,
            started_ms=started_ms,
            at_ms=ended_ms,
        )
    )
    if isinstance(first.artifact, ParetoFront):
        _record_front(first.artifact, stage, tracker, run)
    title = f"{stage}, round {round.number}" if round.number else stage.value
    create_markdown_artifact(explain(title, results), key=f"{stage}{round.suffix}", description=f"What {title} found and decided")


def register_release(record: VersionRecord, tracker: Tracker, report: str) -> None:
    """File the bundle as a registered version, and link the report in the Prefect UI."""
    tracker.register(record)
    create_link_artifact(
        link=f"file://{report}", link_text="four-dimension report", key="report", description="opens on the machine that ran it"
    )


def explain(title: str, results: Mapping[str, AnyStored]) -> str:
    """Return what a stage found and decided, as Markdown."""
    parts = [f"# {title}"]
    for role, stored in results.items():
        artifact, produced = stored.artifact, stored.produced
        state = "found in the store, made" if stored.cached else "made"
        parts += [
            f"## {role}",
            f"{state} at {moment(produced.started_at)} UTC in {duration(produced.wall_s)}, key `{stored.key[:12]}`",
        ]
        if artifact.skipped_because:
            parts.append(f"Skipped: {cell(artifact.skipped_because)}")
        if artifact.measures:
            parts.append(_figures(artifact.measures))
        lines = [f"- {cell(prose(decision.sentence()))}" for decision in artifact.decisions]
        lines += [f"- **warning**: {cell(prose(warning))}" for warning in artifact.warnings]
        parts += ["\n".join(lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def _span_ms(produced: Produced) -> tuple[int, int]:
    """Return when a result was begun and when it was finished."""
    start = datetime.fromisoformat(produced.started_at).timestamp()
    return round(1000 * start), round(1000 * (start + produced.wall_s))


def _figures(measures: tuple[Measure, ...]) -> str:
    """Return a stage's figures as the report shows them."""
    rows = [
        (f"{row.name} ({row.origin})" if row.origin else row.name, row.value, verdict_words(row.verdict), row.limit,
         row.baseline, row.change, row.interval, row.note)
        for row in figure_rows(measures)
    ]  # fmt: skip
    return table(FIGURE_COLUMNS, rows).rstrip()


def _record_front(front: ParetoFront, stage: Stage, tracker: Tracker, run: RunIdentity) -> None:
    """Log every measured candidate as a grandchild and a model, and show all of them as a table in the Prefect UI."""
    for candidate in front.candidates:
        if candidate.measures:
            _record_candidate(candidate, stage, tracker, run)
    create_table_artifact(
        key="pareto",
        table=candidate_table(front),
        description=f"{len(front.candidates)} candidates; {front.choice.label} chosen",
    )


def _record_candidate(candidate: Candidate, stage: Stage, tracker: Tracker, run: RunIdentity) -> None:
    """Log one measured candidate; pruned ones were never measured and get no run."""
    tags = run.tags | {
        "mo.candidate": candidate.strategy.label,
        "mo.dominated": str(candidate.dominated).lower(),
        "mo.feasible": str(candidate.feasible).lower(),
    }
    model = candidate_model(run.flow_run_id, candidate.strategy, tags)
    tracker.record(
        RunRecord(
            record_id=f"{run.flow_run_id}/{stage}/{candidate.strategy.label}",
            parent_id=f"{run.flow_run_id}/{stage}",
            name=candidate.strategy.label,
            tags=tags,
            params=model.params,
            metrics=candidate_metrics(candidate),
            model=model,
        )
    )
