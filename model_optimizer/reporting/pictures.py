"""The report's five pictures as inline SVG. Every figure drawn also stands in a table."""

import math
import re
from dataclasses import dataclass

from model_optimizer.artifacts.measure import Dimension
from model_optimizer.artifacts.quantized import LayerPlan
from model_optimizer.artifacts.report import Report
from model_optimizer.artifacts.verification import LatencyResult
from model_optimizer.reporting.svg import WIDTH, Canvas, Scale, fitted, text_width, ticks
from model_optimizer.reporting.tables import candidate_measure, candidate_status
from model_optimizer.reporting.text import label, number, quantity, signed, size

_SHAPES = {
    "chosen": ("diamond", "mark strong"),
    "first choice": ("diamond", "mark hollow"),
    "baseline": ("square", "mark hollow"),
    "on the front": ("circle", "mark"),
    "dominated": ("circle", "mark hollow"),
    "infeasible": ("cross", "mark stroke"),
}
_NUMBERED = re.compile(r"\.(\d+)\.(.+)$")
_SHADES = 5


@dataclass(frozen=True, slots=True)
class _Point:
    label: str
    row: int
    """Of the candidates' table, from 1."""
    status: str
    kl_nats: float
    tok_per_s: float


def pareto_picture(report: Report) -> str:
    """Return decode throughput over KL for every measured candidate; up and left is better."""
    points = _points(report)
    canvas = Canvas("pareto", 330)
    if not points:
        canvas.text((WIDTH / 2, 160), "no candidate has both a measured throughput and a measured KL", "muted", "middle")
        return canvas.close("Candidates of the scan", "Nothing was measured for this picture.")
    x = Scale(0, max(point.kl_nats for point in points) * 1.15 or 1e-3, 62, WIDTH - 24, math.sqrt)
    y = Scale(0, max(point.tok_per_s for point in points) * 1.12, 278, 24)
    _axes(canvas, x, y)
    places = {point.label: (x(point.kl_nats), y(point.tok_per_s)) for point in points}
    taken = [(at[0] - 8, at[1], at[0] + 8) for at in places.values()]
    for point in sorted(points, key=lambda point: point.status != "chosen"):
        at = places[point.label]
        shape, css = _SHAPES[point.status]
        figures = f"{number(point.tok_per_s)} tok/s, KL {number(point.kl_nats)} nats"
        canvas.mark(at, shape, css, f"{point.label} ({point.status}): {figures}")
        css = "label strong-text" if point.status == "chosen" else "label"
        for name in (point.label, str(point.row)):
            if place := _free_place(at, 1.06 * text_width(name), taken):
                canvas.text(place, name, css)
                break
    words = "; ".join(f"{p.label} ({p.status}) {number(p.tok_per_s)} tok/s at KL {number(p.kl_nats)}" for p in points)
    return canvas.close("Candidates of the scan: speed against damage", f"Decode throughput over KL per token. {words}.")


def _points(report: Report) -> list[_Point]:
    found = []
    for row, candidate in enumerate(report.front.candidates, 1):
        decode = candidate_measure(candidate, Dimension.SPEED, "tok_per_s")
        kl = candidate_measure(candidate, Dimension.ACCURACY, "nats")
        status = candidate_status(report.front, report.compiled.strategy, candidate)
        if decode and kl and decode.value is not None and kl.value is not None and status in _SHAPES:
            found.append(_Point(candidate.strategy.label, row, status, max(kl.value, 0.0), decode.value))
    return found


def _axes(canvas: Canvas, x: Scale, y: Scale) -> None:
    for value in ticks(y.lower, y.upper):
        canvas.line((62, y(value)), (WIDTH - 24, y(value)), "grid")
        canvas.text((54, y(value) + 4.5), number(value), "tick", "end")
    kept = -math.inf
    for value in [0.0, *(10**power * step for power in range(-4, 3) for step in (1, 3))]:
        if value <= x.upper and x(value) - kept > 44:
            kept = x(value)
            canvas.line((kept, 278), (kept, 283), "axis")
            canvas.text((kept, 299), number(value, 1), "tick", "middle")
    canvas.line((62, 278), (WIDTH - 24, 278), "axis")
    canvas.text((62, 14), "decode tokens per second", "tick")
    canvas.text((WIDTH - 24, 320), "KL against the source model, nats per token (square-root scale)", "tick", "end")


def _free_place(at: tuple[float, float], width: float, taken: list[tuple[float, float, float]]) -> tuple[float, float] | None:
    """Return where a label of `width` starts so that it hides no mark and no label; `taken` holds (left, y, right).

    None where the picture has no room for it.
    """

    def free(place: tuple[float, float]) -> bool:
        others = [(left, y, right) for left, y, right in taken if (left + right) / 2 != at[0] or y != at[1]]
        apart = all(abs(place[1] - y) > 14 or place[0] > right or place[0] + width < left for left, y, right in others)
        return apart and 64 <= place[0] <= WIDTH - width and 20 < place[1] < 270

    options = [(at[0] + side, at[1] + shift) for shift in (0, 18, -18) for side in (13, -13 - width)]
    place = next((option for option in options if free(option)), None)
    if place is None:
        return None
    taken.append((place[0], place[1], place[0] + width))
    return round(place[0], 1), round(place[1] + 4.5, 1)


def layers_picture(report: Report) -> str:
    """Return one cell per linear layer: shade is predicted KL, a dot marks a format other than the usual one."""
    plan = [(match, layer) for layer in report.quantized.plan if (match := _NUMBERED.search(layer.layer))]
    if not plan:
        canvas = Canvas("layers", 60)
        canvas.text((WIDTH / 2, 34), "no layer was quantized", "muted", "middle")
        return canvas.close("Predicted damage per layer", "The plan holds no quantized layer.")
    parts = list(dict.fromkeys(match[2] for match, _ in plan))
    columns = 1 + max(int(match[1]) for match, _ in plan)
    width = (WIDTH - 150) / columns
    canvas = Canvas("layers", 60 + 24 * len(parts))
    shade = _shading([layer for _, layer in plan])
    formats = [layer.format for _, layer in plan]
    usual = max(sorted(set(formats)), key=formats.count)
    for row, part in enumerate(parts):
        canvas.text((138, 24 * row + 17), part, "tick", "end")
    for match, layer in plan:
        corner = (round(146 + width * int(match[1]), 1), 24 * parts.index(match[2]) + 2)
        figures = f"predicted KL {number(layer.predicted_kl_nats)} nats, cosine {layer.output_cosine:.4f}"
        hint = f"{layer.layer}: {layer.format}, {figures}"
        canvas.box(corner, (round(width - 2, 1), 22), f"shade-{shade(layer)}", hint)
        if layer.format != usual:
            canvas.mark((round(corner[0] + width / 2 - 1, 1), corner[1] + 11), "circle", "dot")
    bottom = 24 * len(parts) + 18
    for column in range(0, columns, max(1, columns // 10)):
        canvas.text((round(146 + width * (column + 0.5) - 1, 1), bottom), str(column), "tick", "middle")
    canvas.text((146, bottom + 22), "layer, from first to last", "tick")
    worst = max((layer for _, layer in plan), key=lambda layer: layer.predicted_kl_nats)
    description = (
        f"{len(plan)} layers, most as {usual}; the largest predicted KL is {number(worst.predicted_kl_nats)} in {worst.layer}."
    )
    return canvas.close("Predicted damage per layer", description)


@dataclass(frozen=True, slots=True)
class _Shading:
    """Logarithmic classes of predicted KL, 0 the lightest."""

    lower: float
    upper: float

    def __call__(self, layer: LayerPlan) -> int:
        value = max(layer.predicted_kl_nats, self.lower)
        share = math.log(value / self.lower) / (math.log(self.upper / self.lower) or 1)
        return min(int(share * _SHADES), _SHADES - 1)


def _shading(layers: list[LayerPlan]) -> _Shading:
    positive = [layer.predicted_kl_nats for layer in layers if layer.predicted_kl_nats > 0] or [1.0]
    return _Shading(min(positive), max(positive))


def shade_limits(report: Report) -> tuple[str, str]:
    """Return the KL of the lightest and of the darkest shade, as text."""
    shading = _shading(list(report.quantized.plan))
    return f"{number(shading.lower, 2)} nats", f"{number(shading.upper, 2)} nats"


def memory_picture(report: Report) -> str:
    """Return the budget as one stacked bar, with the measured peak as a line."""
    memory = report.memory
    lines = [line for line in memory.budget if line.num_bytes >= 0]
    total = max(sum(line.num_bytes for line in lines), memory.measured_peak_bytes, 1)
    x = Scale(0, total, 8, WIDTH - 8)
    canvas = Canvas("memory", 132)
    start, taken = 0, 0.0
    for index, line in enumerate(lines):
        left, right = x(start), x(start + line.num_bytes)
        css = f"part-{index % 5}" if line.part != "margin" else "part-margin"
        canvas.box((left, 36), (round(max(right - left - 1.5, 1), 1), 40), css, f"{label(line.part)}: {size(line.num_bytes)}")
        if right - left > max(text_width(line.part), 56) and left >= taken:
            canvas.text((left + 1, 94), label(line.part), "label")
            canvas.text((left + 1, 110), size(line.num_bytes), "tick")
            taken = right
        start += line.num_bytes
    peak = x(memory.measured_peak_bytes)
    canvas.line((peak, 24), (peak, 82), "rule")
    canvas.text(
        (peak, 16),
        f"measured peak {size(memory.measured_peak_bytes)}",
        "label strong-text",
        "middle" if 90 < peak < 590 else "start",
    )
    words = "; ".join(f"{label(line.part)} {size(line.num_bytes)}" for line in lines)
    return canvas.close("Memory budget", f"{words}. Measured peak {size(memory.measured_peak_bytes)}.")


def latency_picture(report: Report) -> str:
    """Return the latency percentiles of both engines with their intervals, on one axis of milliseconds."""
    engines = report.verification.latency[:2]
    rows = [
        name for name in ("ttft_p50", "ttft_p95", "p50", "p95", "p99") if any(name in engine.percentiles_ms for engine in engines)
    ]
    canvas = Canvas("latency", 66 + 44 * len(rows))
    uppers = [_upper(engine, name) for engine in engines for name in rows if name in engine.percentiles_ms]
    x = Scale(0, max(uppers, default=1.0) * 1.04, 128, WIDTH - 24)
    bottom = 14 + 44 * len(rows)
    for value in ticks(x.lower, x.upper):
        canvas.line((x(value), 8), (x(value), bottom), "grid")
        canvas.text((x(value), bottom + 18), number(value), "tick", "middle")
    canvas.text((WIDTH - 24, bottom + 40), "milliseconds, bars are 95 % intervals", "tick", "end")
    words = []
    for row, name in enumerate(rows):
        shown = name.upper().replace("TTFT_", "first token ")
        canvas.text((116, 44 * row + 34), shown, "label", "end")
        for index, engine in enumerate(engines):
            if name in engine.percentiles_ms:
                _latency_mark(canvas, x, (44 * row + 22 + 16 * index, index), (engine, name))
                words.append(f"{engine.strategy} {shown} {quantity(engine.percentiles_ms[name], 'ms')}")
    return canvas.close("Latency percentiles of both engines", "; ".join(words) + ".")


def _upper(engine: LatencyResult, name: str) -> float:
    interval = engine.intervals_ms.get(name)
    return max(engine.percentiles_ms[name], interval.upper if interval else 0.0)


def _latency_mark(canvas: Canvas, x: Scale, place: tuple[float, int], figure: tuple[LatencyResult, str]) -> None:
    """Draw one percentile: filled diamond for the chosen engine, hollow square for the baseline."""
    (y, index), (engine, name) = place, figure
    value, interval = engine.percentiles_ms[name], engine.intervals_ms.get(name)
    if interval:
        canvas.line((x(interval.lower), y), (x(interval.upper), y), "whisker" if index == 0 else "whisker faint")
    shape, css = _SHAPES["chosen" if index == 0 else "baseline"]
    canvas.mark((x(value), y), shape, css, f"{engine.strategy} {name}: {quantity(value, 'ms')}")


def golden_picture(report: Report) -> str:
    """Return every golden set's difference with its interval against the margin and zero."""
    rows = report.verification.golden
    canvas = Canvas("golden", 52 + 30 * len(rows))
    reach = [bound for row in rows for bound in (row.interval.lower, row.interval.upper, -row.margin)]
    names = [fitted(row.slice or row.golden_set, 212) for row in rows]
    gutter = max((text_width(name) for name in names), default=0) + 24
    x = Scale(min(reach, default=-0.1) * 1.08, max(0.005, max(reach, default=0.1) * 1.08), gutter, WIDTH - 24)
    bottom = 10 + 30 * len(rows)
    for value in ticks(x.lower, x.upper, 6):
        canvas.line((x(value), 6), (x(value), bottom), "grid")
        canvas.text((x(value), bottom + 17), signed(value), "tick", "middle")
    canvas.line((x(0), 6), (x(0), bottom), "axis")
    canvas.text((WIDTH - 24, bottom + 37), "score difference, chosen − baseline; the tick is the margin", "tick", "end")
    for index, row in enumerate(rows):
        y = 30 * index + 22
        name = row.slice or row.golden_set
        canvas.text((gutter - 12, y + 4.5), names[index], "label" if not row.slice else "tick", "end")
        canvas.line((x(row.interval.lower), y), (x(row.interval.upper), y), "whisker" if row.gates else "whisker faint")
        canvas.line((x(-row.margin), y - 9), (x(-row.margin), y + 9), "rule")
        hint = f"{name}: {signed(row.difference)} ({signed(row.interval.lower)} to {signed(row.interval.upper)})"
        canvas.mark(
            (x(row.difference), y), "diamond" if row.gates else "circle", "mark strong" if row.gates else "mark hollow", hint
        )
    words = "; ".join(
        f"{row.golden_set} {row.slice or ''} {signed(row.difference)} against margin −{number(row.margin)}" for row in rows
    )
    return canvas.close("Golden sets: difference with interval", f"{words}.")
