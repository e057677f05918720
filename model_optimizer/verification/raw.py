"""Raw samples of a verification as one long parquet table: part, engine, group, item, name, value."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from model_optimizer.measurement.load import LoadRecord
from model_optimizer.verification.golden_answers import Scores
from model_optimizer.verification.held_out import TextScore
from model_optimizer.verification.latency import LatencyRun
from model_optimizer.verification.soak_records import Segment


class Row(NamedTuple):
    """One value; `name` carries its unit."""

    part: str
    engine: str
    group: str
    item: str
    name: str
    value: float


def golden_rows(engine: str, scores: Scores) -> Iterable[Row]:
    """Yield log p of every choice of every item."""
    for (golden_set, item), score in scores.items():
        for index, value in enumerate(score.log_probs):
            yield Row("golden", engine, golden_set, item, f"choice_{index}_nats", value)


def held_out_rows(texts: Iterable[TextScore]) -> Iterable[Row]:
    """Yield the sums of every text."""
    for text in texts:
        item = str(text.text)
        yield Row("held_out", "baseline", "", item, "log_prob_nats", text.baseline_log_prob)
        yield Row("held_out", "candidate", "", item, "log_prob_nats", text.candidate_log_prob)
        yield Row("held_out", "candidate", "", item, "kl_nats", text.kl_nats)
        yield Row("held_out", "candidate", "", item, "num_flips", text.num_flips)
        yield Row("held_out", "", "", item, "num_tokens", text.num_tokens)


def latency_rows(run: LatencyRun) -> Iterable[Row]:
    """Yield every finished request of every round, warm-up first."""
    for engine, record in run.warm_up.items():
        yield from _load_rows(engine, "warm-up", record)
    for engine, records in run.rounds.items():
        for number, record in enumerate(records):
            yield from _load_rows(engine, f"round-{number}", record)


def _load_rows(engine: str, group: str, record: LoadRecord) -> Iterable[Row]:
    columns = {
        "end_to_end_ms": record.end_to_end_ms(),
        "ttft_ms": record.ttft_ms(),
        "num_tokens": record.num_tokens[~record.failed],
    }
    for name, values in columns.items():
        for index, value in enumerate(values):
            yield Row("latency", engine, group, str(index), name, float(value))
    yield Row("latency", engine, group, "", "output_tok_per_s", record.output_tok_per_s())


def soak_rows(segments: Iterable[Segment]) -> Iterable[Row]:
    """Yield latencies and memory readings."""
    for number, segment in enumerate(segments):
        group = f"segment-{number}"
        for index, value in enumerate(segment.end_to_end_ms):
            yield Row("soak", "candidate", group, str(index), "end_to_end_ms", value)
        for point in segment.memory:
            yield Row("soak", "candidate", group, f"{point.at_s:.1f} s", "rss_bytes", point.rss_bytes)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write the table; same rows, same bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = list(zip(*rows, strict=True))
    kinds = [pa.string()] * (len(Row._fields) - 1) + [pa.float64()]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    parquet.write_table(pa.table(arrays, names=list(Row._fields)), path, compression="zstd")
