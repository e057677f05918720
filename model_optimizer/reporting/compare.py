"""Two reports side by side: what each run was, how it ended, and every figure that both have.

The two runs were not interleaved, so a difference is only told from noise by intervals that lie apart.
"""

from dataclasses import dataclass

from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from model_optimizer.artifacts.report import Headline, Report
from model_optimizer.reporting.headline import accuracy_words
from model_optimizer.reporting.text import label, number, quantity, signed, size, span, times

DIFFERENCE_UNITS = frozenset({"ratio", "nats", "count"})
"""Units whose values are subtracted; others are divided."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a run was or became, in words."""

    name: str
    left: str
    right: str

    @property
    def same(self) -> bool:
        return self.left == self.right


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure of both runs."""

    left: Measure
    right: Measure

    @property
    def gates(self) -> bool:
        return self.left.verdict is not None or self.right.verdict is not None

    @property
    def relative(self) -> bool:
        """Return whether the figure is against its own run's baseline, hence comparable only where the baselines are the same."""
        return any(it.unit in DIFFERENCE_UNITS and it.baseline in (0.0, 1.0) for it in (self.left, self.right))

    @property
    def difference(self) -> float:
        """Return right - left."""
        assert self.left.value is not None and self.right.value is not None
        return self.right.value - self.left.value

    @property
    def ratio(self) -> float | None:
        """Return right over left, where that says something."""
        assert self.left.value is not None and self.right.value is not None
        return None if self.left.unit in DIFFERENCE_UNITS or not self.left.value else self.right.value / self.left.value

    @property
    def apart(self) -> bool | None:
        """Return whether the two intervals do not touch; None where one of them is missing."""
        left, right = self.left.interval, self.right.interval
        return None if left is None or right is None else left.upper < right.lower or right.upper < left.lower

    def change(self) -> str:
        """Return the difference as read: a percentage, or a difference where a percentage says nothing."""
        if self.difference == 0:
            return "same"
        if self.ratio is not None:
            return f"{signed(100 * (self.ratio - 1), 3)} %"
        return signed(self.difference)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs; `pairs` in the order of the dimensions, gates first, predictions last."""

    facts: tuple[Fact, ...]
    pairs: tuple[Pair, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]

    def absolute(self) -> tuple[Pair, ...]:
        """Return the figures that stand on their own."""
        return tuple(pair for pair in self.pairs if not pair.relative)

    def against_baselines(self) -> tuple[Pair, ...]:
        """Return the figures that are against each run's own baseline."""
        return tuple(pair for pair in self.pairs if pair.relative)


def compare_reports(left: Report, right: Report) -> Comparison:
    """Return everything that two reports have in common, and the names of what only one has."""
    lefts, rights = _figures(left), _figures(right)
    shared = [key for key in lefts if key in rights and lefts[key].unit == rights[key].unit]
    order = list(Dimension)
    pairs = [Pair(lefts[key], rights[key]) for key in shared]
    pairs.sort(key=lambda pair: (order.index(pair.left.dimension), not pair.gates, pair.left.origin is not Origin.MEASURED))
    return Comparison(
        facts=_facts(left, right),
        pairs=tuple(pairs),
        only_left=tuple(name for dimension, name in lefts if (dimension, name) not in shared),
        only_right=tuple(name for dimension, name in rights if (dimension, name) not in shared),
    )


def _figures(report: Report) -> dict[tuple[Dimension, str], Measure]:
    return {(measure.dimension, measure.name): measure for measure in report.measures if measure.value is not None}


def _facts(left: Report, right: Report) -> tuple[Fact, ...]:
    """Return verdicts and what was run, most important first."""
    verdicts = [
        Fact(
            dimension.value,
            *(report.dimensions[dimension].value if dimension in report.dimensions else "–" for report in (left, right)),
        )
        for dimension in Dimension
    ]
    return (
        Fact("verdict", left.verdict.value, right.verdict.value),
        *verdicts,
        Fact("strategy", left.compiled.strategy.label, right.compiled.strategy.label),
        Fact("accuracy difference", *(accuracy_words(report.figures)[0] for report in (left, right))),
        Fact("generation speed", *(_speed_words(report.figures) for report in (left, right))),
        Fact("peak memory", *(size(report.figures.peak_bytes) for report in (left, right))),
        Fact("rounds", *(str(max(len(report.rounds), 1)) for report in (left, right))),
        Fact("baseline", left.front.baseline.label, right.front.baseline.label),
        Fact("bits per weight", *(number(report.quantized.coverage.true_bits_per_weight) for report in (left, right))),
        Fact("engine", *(size(report.figures.engine_bytes) for report in (left, right))),
        Fact("model", left.model_ref, right.model_ref),
        Fact("device", left.target.device.name, right.target.device.name),
    )


def _speed_words(figures: Headline) -> str:
    return "–" if figures.speed_ratio is None else f"{times(figures.speed_ratio)}× baseline"


def pair_cells(pair: Pair) -> tuple[str, str, str, str, str]:
    """Return name, both values with their intervals, the difference, and whether the intervals lie apart."""
    predicted = Origin.PREDICTED in (pair.left.origin, pair.right.origin)
    return (
        label(pair.left.name) + (" (predicted)" if predicted else ""),
        _value(pair.left),
        _value(pair.right),
        pair.change(),
        "–" if pair.apart is None else "yes" if pair.apart else "no",
    )


def _value(measure: Measure) -> str:
    value = quantity(measure.value, measure.unit)
    return value if measure.interval is None else f"{value} ({span(measure.interval, measure.unit)})"
