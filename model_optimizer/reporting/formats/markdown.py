"""The report for reading in a text editor or a repository: every table, no picture."""

from collections.abc import Iterable

from model_optimizer.artifacts.measure import Dimension
from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.headline import accuracy_words
from model_optimizer.reporting.markup import cell, table, verdict_words
from model_optimizer.reporting.renderers import RENDERERS, Renderer
from model_optimizer.reporting.rounds import RAISE_COLUMNS, ROUND_COLUMNS, has_rounds, round_rows
from model_optimizer.reporting.sentences import latency_sentence, parity_sentence, soak_sentence
from model_optimizer.reporting.tables import (
    candidate_rows,
    environment_rows,
    golden_cells,
    golden_note,
    measure_rows,
    not_measured,
    worst_layers,
)
from model_optimizer.reporting.text import duration, label, moment, quantity, size, times

MEASURES = ("measure", "value", "baseline", "change", "95 % interval", "limit", "verdict", "note")
_CANDIDATES = ("strategy", "decoding", "speed ratio", "KL per token", "engine", "status", "note")
_LATENCY = ("engine", "throughput", "p50", "p95", "p99", "failed")
_GOLDEN = (
    "golden set",
    "items",
    "baseline",
    "chosen",
    "difference",
    "interval",
    "flips",
    "margin",
    "detectable",
    "verdict",
    "note",
)


def render_markdown(report: Report) -> bytes:
    """Return the whole report in GitHub-flavoured Markdown."""
    return "\n".join(markdown_sections(report)).encode()


def markdown_sections(report: Report) -> list[str]:
    """Return the report's sections in reading order, most important first."""
    return [
        _opening(report),
        *(_dimension(report, dimension) for dimension in Dimension if dimension in report.dimensions),
        *([_rounds(report)] if has_rounds(report) else []),
        _section("Golden sets", table(_GOLDEN, _golden(report))),
        _section(
            "Latency",
            f"{cell(latency_sentence(report))}\n"
            + (f"\n{table(_LATENCY, _latency(report))}" if report.verification.latency else "")
            + f"\n{cell(soak_sentence(report))}\n\n{cell(parity_sentence(report))}\n",
        ),
        _section("Candidates", table(_CANDIDATES, _candidates(report))),
        _section("Memory", table(("part", "size", "note"), _memory(report))),
        _section(
            "Layers with the largest predicted damage",
            table(("layer", "format", "predicted KL", "cosine", "reason"), _layers(report)),
        ),
        _section(
            "Starting point",
            table(("metric", "now", "target", "acceptable cost"), _start(report)) + "\n" + _list(_answers(report)),
        ),
        _section("Warnings", _list(report.warnings) or "None.\n"),
        _section(
            "Not measured", table(("what", "why"), not_measured(report)) if not_measured(report) else "Nothing is missing.\n"
        ),
        _section("Decisions", _list(f"{stage}: {decision.sentence()}" for stage, decision in report.decisions) or "None.\n"),
        _section("Environment", table(("what", "value"), environment_rows(report))),
        _section("Stages", table(("stage", "took", "started", "key"), _stages(report))),
    ]


def _opening(report: Report) -> str:
    figures = report.figures
    rows = [
        ("size over 2 bytes per parameter", f"{times(figures.size_ratio)}× ({size(figures.engine_bytes)})"),
        ("source file", size(figures.source_bytes)),
        ("generation speed over baseline", "not timed" if figures.speed_ratio is None else f"{times(figures.speed_ratio)}×"),
        ("accuracy difference", "; ".join(accuracy_words(figures))),
        ("peak memory while serving", size(figures.peak_bytes)),
    ]
    heading = f"# {verdict_words(report.verdict)}: {cell(report.name)}\n\nModel: {cell(report.model_ref)}\n"
    return f"{heading}\n{cell(report.headline)}\n\n{table(('headline', 'value'), rows)}"


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}"


def _list(lines: Iterable[str]) -> str:
    return "".join(f"- {cell(line)}\n" for line in lines)


def _dimension(report: Report, dimension: Dimension) -> str:
    rows = [
        (row.name, f"{row.value} ({row.origin})" if row.origin else row.value, row.baseline, row.change, row.interval, row.limit,
         verdict_words(row.verdict), row.note)
        for row in measure_rows(report, dimension)
    ]  # fmt: skip
    title = f"{dimension.value.capitalize()}: {verdict_words(report.dimensions[dimension])}"
    return _section(title, table(MEASURES, rows))


def _rounds(report: Report) -> str:
    """Return the table of rounds and, per round, the raised layers; long lists are folded."""
    rows = round_rows(report)
    parts = [table(ROUND_COLUMNS, [(*row.cells, verdict_words(row.verdict)) for row in rows])]
    for row in rows:
        if row.raised:
            first, rest = row.parts
            parts.append(f"\n### Round {row.cells[0]}\n\n{cell(row.summary)}.\n\n{table(RAISE_COLUMNS, first)}")
            if rest:
                summary = f"<summary>{len(rest)} more layers</summary>"
                parts.append(f"\n<details>{summary}\n\n{table(RAISE_COLUMNS, rest)}\n</details>\n")
    return _section("Rounds", "".join(parts))


def _golden(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            row.golden_set + (f" / {row.slice}" if row.slice else ""),
            *golden_cells(row),
            verdict_words(row.verdict if row.gates else None),
            golden_note(row),
        )
        for row in report.verification.golden
    ]


def _latency(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            row.strategy,
            quantity(row.throughput_tok_per_s, "tok_per_s"),
            *(quantity(row.percentiles_ms.get(name), "ms") for name in ("p50", "p95", "p99")),
            f"{row.num_failed} of {row.num_requests}",
        )
        for row in report.verification.latency
    ]  # fmt: skip


def _candidates(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            row.label,
            row.decode,
            row.speed_ratio,
            row.kl,
            row.engine,
            row.status + (" (figures predicted)" * row.predicted),
            row.note,
        )
        for row in candidate_rows(report.front, report.compiled.strategy)
    ]


def _memory(report: Report) -> list[tuple[str, ...]]:
    rows = [(label(line.part), size(line.num_bytes), line.note) for line in report.memory.budget]
    return [
        *rows,
        ("measured peak", size(report.memory.measured_peak_bytes), f"{report.memory.ran_concurrency} requests at once"),
    ]


def _layers(report: Report) -> list[tuple[str, ...]]:
    return [
        (layer.layer, layer.format, quantity(layer.predicted_kl_nats, "nats"), f"{layer.output_cosine:.4f}", layer.reason)
        for layer in worst_layers(report)
    ]


def _start(report: Report) -> list[tuple[str, ...]]:
    return [(row.metric, row.current, row.target, row.acceptable_cost) for row in report.target.decision_table]


def _answers(report: Report) -> list[str]:
    return [f"{item.question} {item.answer}" for item in report.target.questions]


def _stages(report: Report) -> list[tuple[str, ...]]:
    return [(note.stage, duration(note.wall_s), moment(note.started_at), note.key[:12]) for note in report.stages]


RENDERERS.register("markdown")(Renderer("report.md", render_markdown))
