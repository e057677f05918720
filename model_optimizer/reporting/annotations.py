"""Workflow commands of GitHub Actions: a gate that did not accept, told on the profile's line that set its limit.

A workflow command is a line of the log, so nothing that a model, a profile or an error says may end a line or a property.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from model_optimizer.artifacts.measure import Measure, Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.text import label, quantity, shortened, span

Level = Literal["error", "warning", "notice"]

MOST_PER_LEVEL = 10
"""Source: GitHub documentation, annotations of one level that are shown for a step."""
LONGEST_MESSAGE, LONGEST_TITLE = 1000, 120
LIMIT_FIELDS: dict[str, tuple[str, ...]] = {
    "p50_latency": ("sla", "p50_latency_ms"),
    "p95_latency": ("sla", "p95_latency_ms"),
    "p99_latency": ("sla", "p99_latency_ms"),
    "p95_ttft": ("sla", "ttft_p95_ms"),
    "throughput": ("sla", "throughput_tok_per_s"),
    "generation_throughput": ("sla", "throughput_tok_per_s"),
    "process_peak": ("sla", "memory_gib"),
    "concurrency": ("sla", "concurrency"),
    "cost": ("sla", "cost_usd_per_1k_requests"),
    "kl": ("scan", "max_kl_nats"),
    "soak": ("verify", "required_soak"),
}
"""Measure -> the profile's field that holds its limit."""
_GOLDEN = re.compile(r"golden_(\w+_)?change")
_UNSEEN = dict.fromkeys(
    [*range(10), *range(11, 32), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)
"""Controls but the line end, and what turns the direction of a text."""

LineOf = Callable[[tuple[str, ...]], int]
"""A field of the profile -> its line, or that of the section it would stand in."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """One message, at a line of a file where it has one."""

    level: Level
    title: str
    message: str
    file: str | None = None
    line: int | None = None

    def command(self) -> str:
        """Return the workflow command; one line, whatever the texts hold."""
        place = [] if self.file is None else [f"file={_property(self.file)}", f"line={self.line or 1}"]
        properties = [*place, f"title={_property(shortened(self.title, LONGEST_TITLE))}"]
        return f"::{self.level} {','.join(properties)}::{_data(shortened(self.message, LONGEST_MESSAGE))}"


def commands(annotations: Iterable[Annotation]) -> str:
    """Return the workflow commands, a line each; of more than GitHub shows of a level, the last one counts the rest."""
    lines: list[str] = []
    by_level: dict[Level, list[Annotation]] = {}
    for annotation in annotations:
        by_level.setdefault(annotation.level, []).append(annotation)
    for level, found in by_level.items():
        shown = found if len(found) <= MOST_PER_LEVEL else found[: MOST_PER_LEVEL - 1]
        lines += [annotation.command() for annotation in shown]
        if rest := len(found) - len(shown):
            lines.append(Annotation(level, f"{rest:,} more", "The job summary and the report name them.").command())
    return "".join(f"{line}\n" for line in lines)


def gate_annotations(report: Report, file: str, line_of: LineOf) -> tuple[Annotation, ...]:
    """Return an error per gate that rejected and a warning per undecided one, on the line of `file` that set the limit."""
    gates = [measure for measure in report.measures if measure.verdict in (Verdict.REJECT, Verdict.INCONCLUSIVE)]
    ordered = sorted(gates, key=lambda measure: measure.verdict is not Verdict.REJECT)
    return tuple(_gate(measure, report.name, file, line_of) for measure in ordered)


def limit_field(measure_name: str) -> tuple[str, ...]:
    """Return the profile's field that holds a measure's limit; empty where the limit is none of the profile's."""
    if _GOLDEN.fullmatch(measure_name):
        return ("sla", "accuracy_loss_ratio")
    return LIMIT_FIELDS.get(measure_name, ())


def _gate(measure: Measure, name: str, file: str, line_of: LineOf) -> Annotation:
    field = limit_field(measure.name)
    rejects = measure.verdict is Verdict.REJECT
    bound = "at least" if measure.higher_is_better else "at most"
    parts = [
        f"{label(measure.name)} is {quantity(measure.value, measure.unit)}",
        f"95 % interval {span(measure.interval, measure.unit)}" if measure.interval else "",
        f"allowed {bound} {quantity(measure.limit, measure.unit)}" if measure.limit is not None else "",
        f"{measure.samples_needed:,} more samples would decide" if measure.samples_needed else "",
        f"set by {'.'.join(field)}" if field else "the limit is fixed, not one of the profile's",
        measure.reason if measure.value is None else "",
    ]
    title = f"{name}: {label(measure.name)} {'failed' if rejects else 'is not decided'}"
    message = "; ".join(part for part in parts if part)
    return Annotation("error" if rejects else "warning", title, message, file, line_of(field))


def visible(text: str) -> str:
    """Return text without what cannot be seen and changes how the rest is read: controls (but line ends) and text direction."""
    return text.translate(_UNSEEN)


def _data(text: str) -> str:
    """Escape what a command's message may not hold. Source: GitHub's runner, ActionCommand, escape mappings."""
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return visible(escaped)


def _property(text: str) -> str:
    """Escape what a command's property may not hold: a message's, and what ends a property."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
