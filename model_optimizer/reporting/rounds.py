"""The repair rounds: one row per candidate that was judged, and the layers that got more bits."""

from dataclasses import dataclass

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.repair import RepairRound
from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.svg import WIDTH, Canvas, Scale, fitted, ticks
from model_optimizer.reporting.tables import FIRST_SHOWN
from model_optimizer.reporting.text import number, prose, quantity, signed, span

ROUND_COLUMNS = (
    "round", "strategy", "why", "bits per weight", "predicted KL", "measured KL",
    "difference", "95 % interval", "margin", "items", "verdict",
)  # fmt: skip
RAISE_COLUMNS = ("layer", "before", "after", "predicted KL before", "predicted KL after")
_SHAPES = {
    Verdict.ACCEPT: ("circle", "fill-accept"),
    Verdict.INCONCLUSIVE: ("half", "fill-inconclusive"),
    Verdict.REJECT: ("diamond", "fill-reject"),
}


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round as shown; `cells` in the order of ROUND_COLUMNS without the verdict."""

    cells: tuple[str, ...]
    verdict: Verdict
    raised: tuple[tuple[str, ...], ...]
    """Cells in the order of RAISE_COLUMNS, most harmful first."""
    summary: str
    """How many layers were raised and what that was to bring; empty where none was."""

    @property
    def parts(self) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
        """Return the layers to see at once and, where there are many more, the others."""
        cut = len(self.raised) if len(self.raised) <= 2 * FIRST_SHOWN else FIRST_SHOWN
        return self.raised[:cut], self.raised[cut:]


def has_rounds(report: Report) -> bool:
    """Tell whether there is something to say: a first candidate that was accepted needs no section."""
    return len(report.rounds) > 1


def round_rows(report: Report) -> tuple[RoundRow, ...]:
    """Return every round in the order tried."""
    return tuple(
        RoundRow(
            cells=(
                str(it.round),
                it.strategy,
                prose(it.cause),
                number(it.true_bits_per_weight),
                quantity(it.predicted_kl_nats, "nats"),
                quantity(it.measured_kl_nats, "nats"),
                signed(it.difference),
                span(it.interval, "ratio"),
                f"−{number(it.margin)}",
                f"{it.num_items:,}",
            ),
            verdict=it.verdict,
            raised=tuple(
                (lift.layer, lift.before, lift.after, quantity(lift.kl_before_nats, "nats"), quantity(lift.kl_after_nats, "nats"))
                for lift in it.raised
            ),
            summary=_summary(it),
        )
        for it in report.rounds
    )


def _summary(it: RepairRound) -> str:
    if not it.raised:
        return ""
    before, after = sum(lift.kl_before_nats for lift in it.raised), sum(lift.kl_after_nats for lift in it.raised)
    layers = "1 layer" if len(it.raised) == 1 else f"{len(it.raised)} layers"
    whose = "its" if len(it.raised) == 1 else "their"
    return f"{layers} raised; {whose} predicted KL falls from {quantity(before, 'nats')} to {quantity(after, 'nats')}"


def rounds_picture(report: Report) -> str:
    """Return every round's accuracy difference with its interval against its margin."""
    rounds = report.rounds
    canvas = Canvas("rounds", 56 + 48 * len(rounds))
    reach = [bound for it in rounds for bound in (it.interval.lower, it.interval.upper, -it.margin, 0.0)]
    pad = 0.06 * (max(reach) - min(reach)) or 0.01
    x = Scale(min(reach) - pad, max(reach) + pad, 84, WIDTH - 24)
    bottom = 8 + 48 * len(rounds)
    for value in ticks(x.lower, x.upper):
        canvas.line((x(value), 6), (x(value), bottom), "grid")
        canvas.text((x(value), bottom + 18), signed(value), "tick", "middle")
    canvas.line((x(0), 6), (x(0), bottom), "axis")
    canvas.text((WIDTH - 24, bottom + 38), "score difference, candidate − baseline, with 95 % interval", "tick", "end")
    for index, it in enumerate(rounds):
        _draw_round(canvas, x, 48 * index + 8, it)
    words = "; ".join(
        f"round {it.round}, {it.strategy}: {signed(it.difference)} ({span(it.interval, 'ratio')})"
        f" against margin −{number(it.margin)}, {it.verdict}"
        for it in rounds
    )
    return canvas.close("Repair rounds: accuracy difference against the margin", f"{words}.")


def _draw_round(canvas: Canvas, x: Scale, top: float, it: RepairRound) -> None:
    """Draw the strategy's label and below it the interval, the margin and the verdict's mark."""
    y = top + 32
    canvas.text((72, y + 4.5), f"round {it.round}", "label strong-text", "end")
    canvas.line((x(-it.margin), top + 20), (x(-it.margin), top + 46), "rule")
    canvas.line((x(it.interval.lower), y), (x(it.interval.upper), y), "whisker")
    hint = f"round {it.round}: {signed(it.difference)} ({span(it.interval, 'ratio')}), {it.verdict}"
    shape, css = _SHAPES[it.verdict]
    canvas.mark((x(it.difference), y), shape, css, hint)
    canvas.text((84, top + 14), fitted(it.strategy, WIDTH - 108), "tick")
