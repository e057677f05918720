"""The report's tables as plain text cells; every rendering shows these and computes none of its own."""

from collections.abc import Iterable
from dataclasses import dataclass

from model_optimizer.artifacts.front import Candidate, ParetoFront
from model_optimizer.artifacts.measure import Dimension, Measure, Origin, Verdict
from model_optimizer.artifacts.quantized import LayerPlan
from model_optimizer.artifacts.report import Report
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.artifacts.verification import GoldenResult
from model_optimizer.reporting.text import change, label, number, prose, quantity, signed, size, span, times

ORIGINS = {
    Origin.MEASURED: "",
    Origin.PREDICTED: "predicted",
    Origin.SIMULATED: "simulated",
    Origin.NOT_MEASURED: "not measured",
}
FIRST_SHOWN = 4
"""As many rows of a long list stand open; fewer than as many more are not worth a fold."""


@dataclass(frozen=True, slots=True)
class MeasureRow:
    """One figure as shown; `origin` is empty for a measured one, `verdict` None where it does not gate."""

    name: str
    value: str
    baseline: str
    change: str
    interval: str
    limit: str
    verdict: Verdict | None
    origin: str
    note: str
    compared: bool
    """Whether both engines have it and nothing limits it."""


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One candidate of the scan as shown; `status` is one of the words of `candidate_status`."""

    label: str
    decode: str
    speed_ratio: str
    kl: str
    engine: str
    status: str
    predicted: bool
    """Whether decoding, KL and engine are predictions, because it was never run."""
    note: str


def measure_rows(report: Report, dimension: Dimension) -> tuple[MeasureRow, ...]:
    """Return the figures of one dimension, in the order of `figure_rows`."""
    return figure_rows(measure for measure in report.measures if measure.dimension is dimension)


def figure_rows(measures: Iterable[Measure]) -> tuple[MeasureRow, ...]:
    """Return figures as shown: gates, then what compares with the baseline, last what was not measured."""
    return tuple(_measure_row(measure) for measure in sorted(measures, key=_order))


def folded(rows: tuple[MeasureRow, ...]) -> tuple[tuple[MeasureRow, ...], tuple[MeasureRow, ...]]:
    """Return the figures to see at once and, where there are many more, the others."""
    seen = sum(row.verdict is not None or row.compared for row in rows)
    cut = len(rows) if len(rows) - max(seen, FIRST_SHOWN) < FIRST_SHOWN else max(seen, FIRST_SHOWN)
    return rows[:cut], rows[cut:]


def _order(measure: Measure) -> tuple[bool, bool, bool]:
    return measure.origin is Origin.NOT_MEASURED, measure.verdict is None, not _compared(measure)


def _compared(measure: Measure) -> bool:
    """Tell a figure of both engines from a bound that is shown although it does not gate (a golden set's slice)."""
    return measure.origin is Origin.MEASURED and measure.baseline is not None and measure.limit is None


def _measure_row(measure: Measure) -> MeasureRow:
    notes = [prose(measure.reason)] if measure.reason else []
    if measure.num_samples is not None:
        notes.append(f"n\u00a0=\u00a0{measure.num_samples:,}")
    if measure.mde is not None:
        notes.append(f"smallest detectable effect {quantity(measure.mde, measure.unit)}")
    if measure.samples_needed:
        notes.append(f"{measure.samples_needed:,} more samples needed")
    bound = "" if measure.limit is None else ("≥ " if measure.higher_is_better else "≤ ")
    return MeasureRow(
        name=label(measure.name),
        value=quantity(measure.value, measure.unit),
        baseline=quantity(measure.baseline, measure.unit),
        change=change(measure),
        interval=span(measure.interval, measure.unit),
        limit=bound + quantity(measure.limit, measure.unit),
        verdict=measure.verdict,
        origin=ORIGINS[measure.origin],
        note="; ".join(notes),
        compared=_compared(measure),
    )


def candidate_measure(candidate: Candidate, dimension: Dimension, unit: str) -> Measure | None:
    """Return a candidate's first measure of a dimension and unit, e.g. its decode throughput."""
    found = (measure for measure in candidate.measures if measure.dimension is dimension and measure.unit == unit)
    return next(found, None)


def candidate_status(front: ParetoFront, released: Strategy, candidate: Candidate) -> str:
    """Return `chosen`, `first choice`, `baseline`, `pruned`, `infeasible`, `dominated` or `on the front`.

    `chosen` is the strategy of the engine that the report is about; `first choice` the scan's, where repair went on from it.
    """
    if candidate.strategy == released:
        return "chosen"
    if candidate.strategy == front.choice:
        return "first choice"
    if candidate.strategy == front.baseline:
        return "baseline"
    if candidate.pruned_because is not None:
        return "pruned"
    if not candidate.feasible:
        return "infeasible"
    return "dominated" if candidate.dominated else "on the front"


def candidate_rows(front: ParetoFront, released: Strategy) -> tuple[CandidateRow, ...]:
    """Return every candidate, measured and pruned."""
    return tuple(_candidate_row(candidate, candidate_status(front, released, candidate)) for candidate in front.candidates)


def _candidate_row(candidate: Candidate, status: str) -> CandidateRow:
    decode = candidate_measure(candidate, Dimension.SPEED, "tok_per_s")
    kl = candidate_measure(candidate, Dimension.ACCURACY, "nats")
    engine = candidate_measure(candidate, Dimension.RESOURCE, "bytes")
    flags = [candidate.pruned_because or "", candidate.infeasible_because or ""]
    if candidate.dominated:
        flags.append(f"dominated by {candidate.dominated_by}")
    predicted = candidate.predicted
    ratio, interval = candidate.speed_ratio, candidate.speed_ratio_interval
    spread = "" if interval is None else f" ({times(interval.lower)} to {times(interval.upper)})"
    return CandidateRow(
        label=candidate.strategy.label,
        decode=quantity(decode.value if decode else predicted.decode_tok_per_s, "tok_per_s"),
        speed_ratio="–" if ratio is None else f"{times(ratio)}×{spread}",
        kl=quantity(kl.value if kl else predicted.kl_nats, "nats"),
        engine=quantity(engine.value if engine else predicted.resident_bytes, "bytes"),
        status=status,
        predicted=not candidate.measures,
        note="; ".join(flag for flag in flags if flag),
    )


@dataclass(frozen=True, slots=True)
class GoldenRow:
    """A golden set or slice as shown; `verdict` None where it does not gate."""

    name: str
    is_slice: bool
    cells: tuple[str, ...]
    verdict: Verdict | None
    note: str


def golden_parts(report: Report) -> tuple[tuple[GoldenRow, ...], tuple[GoldenRow, ...]]:
    """Return the rows to see at once, and the slices that do not gate where they are many."""
    found = report.verification.golden
    slices = [row for row in found if row.slice is not None and not row.gates]
    if len(slices) <= 2 * FIRST_SHOWN:
        return tuple(_golden_row(row) for row in found), ()
    return tuple(_golden_row(row) for row in found if row not in slices), tuple(_golden_row(row, whole=True) for row in slices)


def _golden_row(row: GoldenResult, *, whole: bool = False) -> GoldenRow:
    name = row.slice or row.golden_set
    return GoldenRow(
        name=f"{row.golden_set} / {row.slice}" if whole else name,
        is_slice=row.slice is not None and not whole,
        cells=golden_cells(row),
        verdict=row.verdict if row.gates else None,
        note=golden_note(row),
    )


def golden_cells(row: GoldenResult) -> tuple[str, ...]:
    """Return items, baseline, candidate, difference, interval, flips, margin and detectable difference."""
    return (
        f"{row.num_items:,}",
        f"{row.baseline_ratio:.3f}",
        f"{row.candidate_ratio:.3f}",
        signed(row.difference),
        span(row.interval, "ratio"),
        f"+{row.num_gained} / −{row.num_lost}",
        f"−{number(row.margin)}",
        number(row.mde),
    )


def golden_note(row: GoldenResult) -> str:
    """Return metric, reason and how many items are still missing."""
    needed = f"{row.samples_needed:,} more items would decide" if row.samples_needed else ""
    return "; ".join(part for part in (label(row.metric), prose(row.reason), needed) if part)


def worst_layers(report: Report, limit: int = 10) -> tuple[LayerPlan, ...]:
    """Return the layers with the largest predicted damage, worst first."""
    return tuple(sorted(report.quantized.plan, key=lambda layer: -layer.predicted_kl_nats)[:limit])


def not_measured(report: Report) -> tuple[tuple[str, str], ...]:
    """Return (dimension and name, reason) of everything that was not measured."""
    return tuple(
        (f"{measure.dimension}: {label(measure.name)}", measure.reason)
        for measure in report.measures
        if measure.origin is Origin.NOT_MEASURED
    )


def environment_rows(report: Report) -> tuple[tuple[str, str], ...]:
    """Return what the run ran on: device, model, versions, seeds."""
    device, model = report.target.device, report.target.model
    rows = [
        ("device", f"{device.name}, {device.num_cores} cores ({device.kind})"),
        ("instruction sets", ", ".join(device.instruction_sets) or "none that matter here"),
        ("memory", f"{size(device.memory_bytes)}, {size(device.memory_free_bytes)} free when profiled"),
        ("bandwidth", f"{size(device.read_bytes_per_s)}/s read, {size(device.copy_bytes_per_s)}/s copied (measured)"),
        ("arithmetic", f"{number(device.matmul_flop_per_s / 1e9)} GFLOP/s dense matrix product (measured)"),
        ("model", f"{model.architecture}, {model.num_parameters:,} parameters, {model.num_layers} layers"),
    ]
    if model.source_grid:
        rows.append(("source weights", f"lie on a grid already: {model.source_grid}"))
    rows += [(name, version) for name, version in sorted(report.versions.items())]
    return (*rows, ("seeds", ", ".join(f"{name} {seed}" for name, seed in report.seeds.items()) or "none"))
