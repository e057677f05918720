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
from model_optimizer.reporting.markup import cell, table, verdict_words
from model_optimizer.reporting.renderers import RENDERERS
from model_optimizer.reporting.summary import verdict_markdown
from model_optimizer.reporting.tables import candidate_rows, figure_rows
from model_optimizer.reporting.text import duration, moment, prose
from tasks.tracking import RunRecord, Tracker, VersionRecord

AnyStored = Stored[Any]
"""A stored result of any stage."""
FIGURE_COLUMNS = ("measure", "value", "verdict", "limit", "baseline", "change", "95 % interval", "note")


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
    """Close the parent run with the headline, the gates' figures and the report: what two commits are compared by.

    Its name says profile, verdict and strategy, for MLflow shows names, parameters and metrics side by side, but no tags.
    """
    strategy, summary = report.compiled.strategy.label, verdict_markdown(report)
    tracker.record(
        RunRecord(
            record_id=run.flow_run_id,
            parent_id=None,
            name=run.name,
            tags=run.tags
            | {
                "mo.verdict": report.verdict.value,
                "mo.strategy": strategy,
                "mlflow.runName": f"{run.name}: {report.verdict}, {strategy}",
                "mlflow.note.content": summary,
            },
            metrics=headline_metrics(report) | gate_metrics(report),
            texts={
                "report.html": page.read_text(encoding="utf-8"),
                "report.md": RENDERERS.get("markdown").render(report).decode(),
                "report.json": report.model_dump_json(),
            },
            failed=report.verdict is not Verdict.ACCEPT,
        )
    )
    # MLflow refuses a parameter that changes, as after a Retry that measured anew: sent apart, so that nothing else is lost
    tracker.record(
        RunRecord(
            record_id=run.flow_run_id,
            parent_id=None,
            name=run.name,
            params=outcome_params(run, report),
            failed=report.verdict is not Verdict.ACCEPT,
        )
    )
    create_markdown_artifact(
        f"{summary}\nReport: `{page}`\n", key="verdict", description=f"{run.name}: {report.verdict}, {strategy}"
    )


def outcome_params(run: RunIdentity, report: Report) -> dict[str, str]:
    """Return what a run was about and how it ended, as MLflow parameters."""
    return {
        "profile": run.name,
        "model": report.model_ref,
        "device": report.target.device.name,
        "strategy": report.compiled.strategy.label,
        "verdict": report.verdict.value,
        "rounds": str(max(len(report.rounds), 1)),
    } | {f"verdict {dimension}": verdict.value for dimension, verdict in report.dimensions.items()}


def headline_metrics(report: Report) -> dict[str, float]:
    """Return the report's figures in large type; MLflow sorts capital letters first."""
    figures = report.figures
    values = {
        "size_ratio": figures.size_ratio,
        "generation_speed_ratio": figures.speed_ratio,
        "accuracy_difference_ratio": figures.accuracy_difference,
        "decode_tok_per_s": figures.decode_tok_per_s,
        "engine_bytes": figures.engine_bytes,
        "peak_bytes": figures.peak_bytes,
    }
    return {f"Headline/{name}": float(value) for name, value in values.items() if value is not None}


def gate_metrics(report: Report) -> dict[str, float]:
    """Return every gate's figure, and per dimension 1 where it was accepted."""
    verdicts = {f"gate.{dimension}": float(verdict is Verdict.ACCEPT) for dimension, verdict in report.dimensions.items()}
    return metrics_of(tuple(measure for measure in report.measures if measure.verdict is not None)) | verdicts


def end_run_early(tracker: Tracker, run: RunIdentity, *, because: str | None = None) -> None:
    """Close the parent run of a run that has no release: asked to end before it, or failed `because` of an error."""
    tags = run.tags if because is None else run.tags | {"mo.failed_because": because}
    tracker.record(RunRecord(record_id=run.flow_run_id, parent_id=None, name=run.name, tags=tags, failed=because is not None))


@task(name="record", cache_policy=NO_CACHE, task_run_name="record-{stage}")
def record_stage(
    stage: Stage, results: Mapping[str, AnyStored], tracker: Tracker, run: RunIdentity, *, round_number: int = 0
) -> None:
    """Log one stage to MLflow as a child of the run, and show it in the Prefect UI.

    `results` are the stage's results by role (`chosen`, `baseline`); the first one names the run that did the work.
    A stage that a repair runs again is logged once per round; `round_number` 0 is the first.
    """
    first = next(iter(results.values()))
    again = f"-round{round_number}" if round_number else ""
    tracker.record(
        RunRecord(
            record_id=f"{run.flow_run_id}/{stage}{again}",
            parent_id=run.flow_run_id,
            name=f"{list(Stage).index(stage) + 1}-{stage}{again}",
            tags=run.tags
            | {
                "mo.stage": stage.value,
                "mo.round": str(round_number),
                "mo.cached": str(first.cached).lower(),
                "mo.produced_at": first.produced.started_at,
            }
            | {f"mo.key.{role}": stored.key for role, stored in results.items()},
            metrics=metrics_of(first.artifact.measures) | {"resource/stage_wall_s": first.produced.wall_s},
            texts={f"{role}.json": stored.artifact.model_dump_json(indent=1) for role, stored in results.items()}
            | {"explanation.md": explain(stage.value, results)},
        )
    )
    if isinstance(first.artifact, ParetoFront):
        for candidate in first.artifact.candidates:
            _record_candidate(candidate, stage, tracker, run)
        front = first.artifact
        create_table_artifact(
            key="pareto",
            table=candidate_table(front),
            description=f"{len(front.candidates)} candidates; {front.choice.label} chosen",
        )
    title = f"{stage}, round {round_number}" if round_number else stage.value
    create_markdown_artifact(explain(title, results), key=f"{stage}{again}", description=f"What {title} found and decided")


@task(name="register", cache_policy=NO_CACHE)
def register_release(record: VersionRecord, tracker: Tracker, report: str) -> None:
    """File the bundle as a registered version, and link the report in the Prefect UI."""
    tracker.register(record)
    create_link_artifact(
        link=f"file://{report}", link_text="four-dimension report", key="report", description="opens on the machine that ran it"
    )


def metrics_of(measures: tuple[Measure, ...]) -> dict[str, float]:
    """Return `<dimension>/<name>_<unit>` -> value for everything that has a value."""
    return {measure.metric: measure.value for measure in measures if measure.value is not None}


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


def _figures(measures: tuple[Measure, ...]) -> str:
    """Return a stage's figures as the report shows them."""
    rows = [
        (f"{row.name} ({row.origin})" if row.origin else row.name, row.value, verdict_words(row.verdict), row.limit,
         row.baseline, row.change, row.interval, row.note)
        for row in figure_rows(measures)
    ]  # fmt: skip
    return table(FIGURE_COLUMNS, rows).rstrip()


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


def candidate_table(front: ParetoFront) -> list[dict[str, str]]:
    """Return one row per candidate, the chosen one first."""
    rows = sorted(candidate_rows(front, front.choice), key=lambda row: row.status != "chosen")
    return [
        {
            "strategy": row.label,
            "status": row.status,
            "decoding": row.decode,
            "speed ratio": row.speed_ratio,
            "KL per token": row.kl,
            "engine": row.engine,
            "figures": "predicted" if row.predicted else "measured",
            "note": prose(row.note),
        }
        for row in rows
    ]
