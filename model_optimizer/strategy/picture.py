"""The scan as one picture: speed against damage, size as area. SVG, readable on light and dark ground.

What a mark means is said by shape and words, never by colour alone. Ink is mid-grey on a transparent ground.
"""

import io
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from model_optimizer.artifacts.front import Candidate, ParetoFront

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, ACCENT, FAINT = "#767676", "#1a7f9c", "#9a8f80"
"""Contrast of INK and ACCENT: at least 4.0 against white and 4.0 against #121212."""
KL_FLOOR_NATS = 1e-6
"""Where a KL of zero is drawn on the logarithmic axis."""
LARGEST_AREA = 900.0
"""Marker area of the candidate with the most resident bytes, in square points."""


def draw(front: ParetoFront, max_kl_nats: float) -> str:
    """Return the measured candidates as an SVG document.

    x: decode tokens per second; y: KL in nats (logarithmic); area: resident bytes; filled circle = on the frontier
    and feasible, ring = dominated, cross = infeasible, star = chosen.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    measured = [candidate for candidate in front.candidates if candidate.measures]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "scan", "font.family": "sans-serif", "font.size": 11}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        largest = max(value(candidate, "resident") for candidate in measured)
        for candidate in measured:
            x, y = value(candidate, "generation_throughput"), max(value(candidate, "kl"), KL_FLOOR_NATS)
            area = LARGEST_AREA * value(candidate, "resident") / largest
            chosen = candidate.strategy == front.choice
            _mark(axes, candidate, (x, y, area), chosen=chosen)
            text = f"{candidate.strategy.label}\n{value(candidate, 'resident') / 2**20:.0f} MiB, {_state(candidate, chosen)}"
            axes.annotate(
                text, (x, y), xytext=(0, 7 + area**0.5 / 2), textcoords="offset points", ha="center", fontsize=8.5, color=INK
            )
        _dress(axes, max_kl_nats)
        target = io.StringIO()
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _accessible(target.getvalue(), describe(measured, front))


def value(candidate: Candidate, name: str) -> float:
    """Return the value of a measure that every measured candidate has."""
    found = next(measure.value for measure in candidate.measures if measure.name == name)
    assert found is not None
    return found


def describe(measured: Sequence[Candidate], front: ParetoFront) -> str:
    """Return the picture in words, one clause per candidate."""
    clauses = [
        f"{c.strategy.label}: {value(c, 'generation_throughput'):.1f} tokens per second, KL {value(c, 'kl'):.3g} nats, "
        f"{value(c, 'resident') / 2**20:.0f} MiB resident, {_state(c, c.strategy == front.choice)}"
        for c in measured
    ]
    return "; ".join(clauses)


def _state(candidate: Candidate, chosen: bool) -> str:
    words = ["chosen"] if chosen else []
    words += ["infeasible"] if not candidate.feasible else []
    words += ["dominated"] if candidate.dominated else []
    return " and ".join(words) or "on the frontier"


def _mark(axes: "Axes", candidate: Candidate, place: tuple[float, float, float], *, chosen: bool) -> None:
    """Draw one candidate; size says bytes, shape and fill say its state."""
    x, y, area = place
    filled = candidate.feasible and not candidate.dominated
    edge = ACCENT if chosen else INK
    axes.scatter([x], [y], s=area, marker="o", facecolor=edge if filled else "none", edgecolor=edge, alpha=0.75, linewidth=1.4)
    if not candidate.feasible:
        axes.scatter([x], [y], s=70, marker="x", color=INK, linewidth=1.8)
    if chosen:
        axes.scatter([x], [y], s=70, marker="*", facecolor="#ffffff", edgecolor=INK, linewidth=0.8)


def _dress(axes: "Axes", max_kl_nats: float) -> None:
    """Scale, label and colour the axes, and draw the KL limit."""
    axes.set_yscale("log")
    axes.margins(x=0.22, y=0.28)
    axes.axhline(max_kl_nats, color=FAINT, linewidth=1, linestyle="--")
    label = f"KL limit {max_kl_nats:g} nats"
    axes.text(0.01, max_kl_nats, label, transform=axes.get_yaxis_transform(), ha="left", va="bottom", fontsize=8.5, color=INK)
    axes.set_xlabel("decode throughput, tokens per second, all streams", color=INK)
    axes.set_ylabel("KL from the float32 reference, nats per token (log)", color=INK)
    axes.tick_params(colors=INK, which="both")
    for spine in axes.spines.values():
        spine.set_color(INK)
    axes.grid(True, color=FAINT, alpha=0.25, linewidth=0.6)


def _accessible(svg: str, description: str) -> str:
    """Give the document a role, a title and a description, and let it scale to its place."""
    body = svg[svg.index("<svg") :]
    opening = re.match(r"<svg[^>]*>", body)
    assert opening is not None
    tag = re.sub(r'\s(width|height)="[^"]*"', "", opening[0])
    tag = tag[:-1] + ' role="img" aria-labelledby="scan-title scan-description" style="max-width:100%;height:auto">'
    title = '<title id="scan-title">Scanned candidates: speed, damage and size</title>'
    return f'{tag}\n{title}\n<desc id="scan-description">{escape(description)}</desc>{body[opening.end() :]}'
