"""The record step: uncached in every run, so that a rerun's picture in MLflow and Prefect is complete."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from model_optimizer.artifacts.base import Stage, Stored
from model_optimizer.artifacts.front import Candidate, ParetoFront
from model_optimizer.artifacts.measure import Measure, Verdict
from model_optimizer.artifacts.report import Report
from tasks.tracking import RunRecord, Tracker, VersionRecord

AnyStored = Stored[Any]
"""A stored result of any stage."""


@dataclass(frozen=True)
class RunIdentity:
    """What every record of one flow run carries."""

    flow_run_id: str
    name: str
    tags: dict[str, str]


def open_run(tracker: Tracker, run: RunIdentity) -> None:
    """Send what earlier runs could not, and open this run's parent."""
    tracker.send_spooled()
    tracker.record(RunRecord(record_id=run.flow_run_id, parent_id=None, name=run.name, tags=run.tags, finished=False))


def close_run(tracker: Tracker, run: RunIdentity, report: Report, page: Path) -> None:
    """Close the parent run with the gates' figures and the report: what two commits are compared by."""
    gates = tuple(measure for measure in report.measures if measure.verdict is not None)
    verdicts = {f"gate.{dimension}": float(verdict is Verdict.ACCEPT) for dimension, verdict in report.dimensions.items()}
    tracker.record(
        RunRecord(
            record_id=run.flow_run_id,
            parent_id=None,
            name=run.name,
            tags=run.tags | {"mo.verdict": report.verdict.value},
            metrics=metrics_of(gates) | verdicts,
            texts={"report.html": page.read_text(encoding="utf-8"), "report.json": report.model_dump_json()},
            failed=report.verdict is not Verdict.ACCEPT,
        )
    )


@task(name="record", cache_policy=NO_CACHE, task_run_name="record-{stage}")
def record_stage(stage: Stage, results: Mapping[str, AnyStored], tracker: Tracker, run: RunIdentity) -> None:
    """Log one stage to MLflow as a child of the run, and show it in the Prefect UI.

    `results` are the stage's results by role (`chosen`, `baseline`); the first one names the run that did the work.
    """
    first = next(iter(results.values()))
    tracker.record(
        RunRecord(
            record_id=f"{run.flow_run_id}/{stage}",
            parent_id=run.flow_run_id,
            name=f"{list(Stage).index(stage) + 1}-{stage}",
            tags=run.tags
            | {
                "mo.stage": stage.value,
                "mo.cached": str(first.cached).lower(),
                "mo.produced_at": first.produced.started_at,
            }
            | {f"mo.key.{role}": stored.key for role, stored in results.items()},
            metrics=metrics_of(first.artifact.measures) | {"resource/stage_wall_s": first.produced.wall_s},
            texts={f"{role}.json": stored.artifact.model_dump_json(indent=1) for role, stored in results.items()}
            | {"explanation.md": explain(stage, results)},
        )
    )
    if isinstance(first.artifact, ParetoFront):
        for candidate in first.artifact.candidates:
            _record_candidate(candidate, stage, tracker, run)
        create_table_artifact(key="pareto", table=[_row(c) for c in first.artifact.candidates], description="Pareto scan")
    create_markdown_artifact(explain(stage, results), key=stage.value, description=f"What {stage} found and decided")


@task(name="register", cache_policy=NO_CACHE)
def register_release(record: VersionRecord, tracker: Tracker, report: str) -> None:
    """File the bundle as a registered version, and link the report in the Prefect UI."""
    tracker.register(record)
    create_link_artifact(link=f"file://{report}", link_text="four-dimension report", key="report")


def metrics_of(measures: tuple[Measure, ...]) -> dict[str, float]:
    """Return `<dimension>/<name>_<unit>` -> value for everything that has a value."""
    return {measure.metric: measure.value for measure in measures if measure.value is not None}


def explain(stage: Stage, results: Mapping[str, AnyStored]) -> str:
    """Return what a stage found and decided, as Markdown."""
    lines = [f"# {stage}"]
    for role, stored in results.items():
        artifact = stored.artifact
        state = "found in the store, made" if stored.cached else "made"
        lines += [
            "",
            f"## {role}",
            "",
            f"{state} at {stored.produced.started_at} in {stored.produced.wall_s:.1f} s, key `{stored.key[:12]}`",
        ]
        if artifact.skipped_because:
            lines += ["", f"Skipped: {artifact.skipped_because}"]
        if artifact.measures:
            lines += ["", "| measure | value | unit | limit | verdict | origin |", "|---|---|---|---|---|---|"]
            lines += [_measure_row(measure) for measure in artifact.measures]
        lines += ["", *(f"- {decision.sentence()}" for decision in artifact.decisions)]
        lines += [f"- warning: {warning}" for warning in artifact.warnings]
    return "\n".join(lines) + "\n"


def _measure_row(measure: Measure) -> str:
    value = "" if measure.value is None else f"{measure.value:.6g}"
    limit = "" if measure.limit is None else f"{measure.limit:.6g}"
    return f"| {measure.metric} | {value} | {measure.unit} | {limit} | {measure.verdict or ''} | {measure.origin} |"


def _record_candidate(candidate: Candidate, stage: Stage, tracker: Tracker, run: RunIdentity) -> None:
    """Log one measured candidate as a grandchild; pruned ones were never measured and get none."""
    if not candidate.measures:
        return
    tracker.record(
        RunRecord(
            record_id=f"{run.flow_run_id}/{stage}/{candidate.strategy.label}",
            parent_id=f"{run.flow_run_id}/{stage}",
            name=candidate.strategy.label,
            tags=run.tags
            | {
                "mo.candidate": candidate.strategy.label,
                "mo.dominated": str(candidate.dominated).lower(),
                "mo.feasible": str(candidate.feasible).lower(),
            },
            params={
                "method": candidate.strategy.weights.method,
                "formats": ",".join(candidate.strategy.weights.formats),
                "runtime": candidate.strategy.runtime,
            },
            metrics=metrics_of(candidate.measures),
        )
    )


def _row(candidate: Candidate) -> dict[str, str]:
    values = {measure.metric: f"{measure.value:.4g}" for measure in candidate.measures if measure.value is not None}
    flags = {
        "candidate": candidate.strategy.label,
        "dominated": str(candidate.dominated_by or candidate.dominated),
        "feasible": candidate.infeasible_because or str(candidate.feasible),
        "pruned": candidate.pruned_because or "",
    }
    return flags | values
