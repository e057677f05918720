"""Two runs side by side as one self-contained page: verdicts, gates, both fronts in one picture, and what else differs."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from model_optimizer.artifacts.measure import Dimension
from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.compare import Comparison, Pair, gate_cells, pair_cells
from model_optimizer.reporting.side_by_side import answers_template, page_style
from model_optimizer.reporting.svg import WIDTH, Canvas, Scale, fitted, text_width, ticks
from model_optimizer.reporting.tables import candidate_measure, candidate_status
from model_optimizer.reporting.text import label, number

HEIGHT, BOTTOM, LEFT = 372.0, 300.0, 62.0
SIDES = ("left", "right")
SHAPES = ("circle", "square")


@dataclass(frozen=True, slots=True)
class _Point:
    """One measured candidate of one of the runs."""

    side: int
    run: str
    label: str
    status: str
    kl_nats: float
    tok_per_s: float

    @property
    def words(self) -> str:
        return f"{self.run}: {self.label} ({self.status}), {number(self.tok_per_s)} tok/s, KL {number(self.kl_nats)} nats"


def render_comparison(comparison: Comparison, reports: tuple[Report, Report], names: tuple[str, str]) -> bytes:
    """Return the page; every text in it is escaped."""
    missing = zip(names, (comparison.only_right, comparison.only_left), strict=True)
    page = answers_template("compare.html.j2").render(
        style=page_style("compare.css"),
        names=names,
        comparison=comparison,
        gates=[
            (dimension.value, [gate_cells(gate) for gate in gates])
            for dimension, gates in itertools.groupby(comparison.gates, key=lambda gate: gate.dimension)
        ],
        groups=[
            ("Figures that stand on their own", _rows(comparison.absolute())),
            ("Figures against each run's own baseline", _rows(comparison.against_baselines())),
        ],
        only=[(name, [label(it) for it in figures]) for name, figures in missing if figures],
        picture=Markup(fronts_picture(reports, names)),  # its texts are escaped where they are drawn
    )
    return page.encode()


def _rows(pairs: tuple[Pair, ...]) -> list[tuple[str, str, str, str, str]]:
    return [pair_cells(pair) for pair in pairs if not pair.gates]


def fronts_picture(reports: tuple[Report, Report], names: tuple[str, str]) -> str:
    """Return decode throughput over KL for every measured candidate of both runs; up and left is better."""
    points = [point for side in (0, 1) for point in _points(reports[side], side, names[side])]
    canvas = Canvas("fronts", HEIGHT)
    if not points:
        canvas.text((WIDTH / 2, 160), "no candidate has both a measured throughput and a measured KL", "muted", "middle")
        return canvas.close("Candidates of both scans", "Nothing was measured for this picture.")
    x = Scale(0, max(point.kl_nats for point in points) * 1.15 or 1e-3, LEFT, WIDTH - 24, math.sqrt)
    y = Scale(0, max(point.tok_per_s for point in points) * 1.12, BOTTOM, 24)
    _axes(canvas, x, y)
    for point in sorted(points, key=lambda point: (point.status == "chosen", -point.side)):  # a circle leaves a square's corners
        _draw_point(canvas, point, (x(point.kl_nats), y(point.tok_per_s)))
    for side, name in enumerate(names):
        at = (LEFT + 8 + 300 * side, HEIGHT - 8)
        canvas.mark((at[0], at[1] - 4), SHAPES[side], f"mark {SIDES[side]}", "")
        canvas.text((at[0] + 13, at[1]), fitted(name, 270), "label")
    words = "; ".join(point.words for point in points)
    return canvas.close("Candidates of both scans: speed against damage", f"Decode throughput over KL per token. {words}.")


def _draw_point(canvas: Canvas, point: _Point, at: tuple[float, float]) -> None:
    """Draw a candidate in its run's shape and colour: the chosen one as a labelled diamond, the baseline hollow, others pale."""
    css = {"baseline": " base", "dominated": " weak", "infeasible": " weak"}.get(point.status, "")
    shape = "diamond" if point.status == "chosen" else SHAPES[point.side]
    canvas.mark(at, shape, f"mark {SIDES[point.side]}{css}", point.words)
    if point.status != "chosen":
        return
    words = fitted(point.label, 300)
    over = at[0] + 13 + text_width(words) > WIDTH
    place = (at[0] - 13 if over else at[0] + 13, at[1] + (-10.0, 20.0)[point.side])
    canvas.text(place, words, f"label {SIDES[point.side]}-text", "end" if over else "start")


def _points(report: Report, side: int, run: str) -> Iterator[_Point]:
    """Yield every candidate that has both a measured throughput and a measured KL."""
    for candidate in report.front.candidates:
        decode = candidate_measure(candidate, Dimension.SPEED, "tok_per_s")
        kl = candidate_measure(candidate, Dimension.ACCURACY, "nats")
        if decode and kl and decode.value is not None and kl.value is not None:
            status = candidate_status(report.front, report.compiled.strategy, candidate)
            yield _Point(side, run, candidate.strategy.label, status, max(kl.value, 0.0), decode.value)


def _axes(canvas: Canvas, x: Scale, y: Scale) -> None:
    for value in ticks(y.lower, y.upper):
        canvas.line((LEFT, y(value)), (WIDTH - 24, y(value)), "grid")
        canvas.text((LEFT - 8, y(value) + 4.5), number(value), "tick", "end")
    kept = -math.inf
    for value in [0.0, *(10**power * step for power in range(-4, 3) for step in (1, 3))]:
        if value <= x.upper and x(value) - kept > 44:
            kept = x(value)
            canvas.line((kept, BOTTOM), (kept, BOTTOM + 5), "axis")
            canvas.text((kept, BOTTOM + 21), number(value, 1), "tick", "middle")
    canvas.line((LEFT, BOTTOM), (WIDTH - 24, BOTTOM), "axis")
    canvas.text((LEFT, 14), "decode tokens per second", "tick")
    canvas.text((WIDTH - 24, BOTTOM + 42), "KL against the source model, nats per token (square-root scale)", "tick", "end")
