"""What MLflow shows of a run: parameters, metrics, candidates and tables, named so that they sort and compare well."""

import json
from collections.abc import Sequence

from model_optimizer.artifacts.base import StageArtifact, Tree
from model_optimizer.artifacts.front import Candidate, ParetoFront
from model_optimizer.artifacts.measure import Measure, Verdict
from model_optimizer.artifacts.quantized import QuantizedModel
from model_optimizer.artifacts.report import Report
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.verification import Verification
from model_optimizer.reporting.tables import candidate_rows
from model_optimizer.reporting.text import prose
from tasks.letters import DatasetRecord, ModelRecord

TABLES_TAG = "mlflow.loggedArtifacts"
"""Names the artifacts that MLflow's Evaluation tab shows as tables and lines up across runs."""

DIGEST_CHARACTERS = 32
"""MLflow takes 36 at most."""

Row = dict[str, str | float | bool]


def outcome_params(name: str, report: Report) -> dict[str, str]:
    """Return what a run was about and how it ended, as MLflow parameters."""
    return {
        "profile": name,
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


def metrics_of(measures: tuple[Measure, ...]) -> dict[str, float]:
    """Return `<dimension>/<name>_<unit>` -> value for everything that has a value."""
    return {measure.metric: measure.value for measure in measures if measure.value is not None}


def candidate_metrics(candidate: Candidate) -> dict[str, float]:
    """Return every axis that a front can be drawn over: what was measured, and what had been predicted, which says so."""
    more = {
        "speed/generation_speed_ratio": candidate.speed_ratio,
        "score_ratio": candidate.score_ratio,
        "accuracy/predicted_kl_nats": candidate.predicted.kl_nats,
        "speed/predicted_decode_tok_per_s": candidate.predicted.decode_tok_per_s,
        "resource/predicted_resident_bytes": float(candidate.predicted.resident_bytes),
    }
    return metrics_of(candidate.measures) | {name: value for name, value in more.items() if value is not None}


def strategy_params(strategy: Strategy) -> dict[str, str]:
    """Return what tells candidates apart, a word each: `int4-g64` is precision int4 in groups of 64."""
    weights = strategy.weights
    precisions = [name.partition("-")[0] for name in weights.formats]
    groups = [name.partition("-")[2].partition("-")[0] for name in weights.formats]
    params = {
        "precision": "+".join(dict.fromkeys(precisions)),
        "group": "+".join(dict.fromkeys(group for group in groups if group)) or "none",
        "method": weights.method,
        "runtime": strategy.runtime,
        "formats": ",".join(weights.formats),
        "repairs": str(weights.repairs),
    }
    return params | ({"bits_budget": f"{weights.bits_budget:g}"} if weights.bits_budget else {})


def candidate_model(flow_run_id: str, strategy: Strategy, tags: dict[str, str]) -> ModelRecord:
    """Return a candidate's row of the Models tab; MLflow refuses slashes and dots in its name."""
    return ModelRecord(
        record_id=f"{flow_run_id}/model/{strategy.label}",
        name=f"{strategy.weights.label} on {strategy.runtime}".replace(".", "_"),
        params=strategy_params(strategy),
        tags=tags | {"mo.candidate": strategy.label},
    )


def golden_datasets(golden: Sequence[Tree], report: Report) -> tuple[DatasetRecord, ...]:
    """Return the golden sets as a run's inputs."""
    sizes = {row.golden_set: row.num_items for row in report.verification.golden if row.slice is None}
    return tuple(
        DatasetRecord(
            name=tree.path.name,
            digest=tree.digest[:DIGEST_CHARACTERS],
            source=tree.path.name,
            num_items=sizes.get(tree.path.name, 0),
        )
        for tree in golden
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


def tables_of(artifact: StageArtifact) -> dict[str, str]:
    """Return a stage's tables, file name -> content: candidates, layers or golden sets."""
    found: dict[str, list[Row]] = {}
    match artifact:
        case ParetoFront():
            found["candidates.json"] = [dict(row) for row in candidate_table(artifact)]
        case QuantizedModel():
            found["layers.json"] = _layer_rows(artifact)
        case Verification():
            found["golden.json"] = _golden_rows(artifact)
    return {name: table_json(rows) for name, rows in found.items() if rows}


def tables_tag(names: Sequence[str]) -> dict[str, str]:
    """Return the tag that makes MLflow show these artifacts as tables."""
    return {TABLES_TAG: json.dumps([{"path": name, "type": "table"} for name in names])} if names else {}


def table_json(rows: Sequence[Row]) -> str:
    """Return rows of the same columns in MLflow's form of a table."""
    columns = list(rows[0])
    return json.dumps({"columns": columns, "data": [[row[column] for column in columns] for row in rows]}, ensure_ascii=False)


def _layer_rows(quantized: QuantizedModel) -> list[Row]:
    return [
        {
            "layer": it.layer,
            "format": it.format,
            "bits_per_weight": round(8 * it.num_bytes / it.num_weights, 3),
            "predicted_kl_nats": it.predicted_kl_nats,
            "output_cosine": it.output_cosine,
            "suspect": it.suspect,
            "reason": prose(it.reason),
        }
        for it in quantized.plan
    ]


def _golden_rows(verification: Verification) -> list[Row]:
    return [
        {
            "golden_set": it.golden_set,
            "slice": it.slice or "",
            "num_items": it.num_items,
            "baseline_ratio": it.baseline_ratio,
            "candidate_ratio": it.candidate_ratio,
            "difference": it.difference,
            "lower": it.interval.lower,
            "upper": it.interval.upper,
            "margin": it.margin,
            "gates": it.gates,
            "verdict": it.verdict.value,
        }
        for it in verification.golden
    ]
