"""Two reports side by side: what each run was, how it ended, and every figure that both have.

The two runs were not interleaved: their intervals are independent, and what the machine did meanwhile is in neither of them.
"""

import math
from dataclasses import dataclass

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Origin
from model_optimizer.artifacts.report import Headline, Report
from model_optimizer.reporting.comparable import Fact as Fact
from model_optimizer.reporting.comparable import doubts, environment_facts, strategy_facts
from model_optimizer.reporting.headline import accuracy_words
from model_optimizer.reporting.text import label, number, quantity, signed, size, span, times

DIFFERENCE_UNITS = frozenset({"ratio", "nats", "count"})
"""Units whose values are subtracted; others are divided."""


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

    @property
    def difference_interval(self) -> Interval | None:
        """Return the interval of right - left from the two independent ones, None where one is missing or they differ in level.

        Source: Zou and Donner (2008), Construction of confidence limits about effect measures, Statistics in Medicine 27, eq. 1.
        """
        left, right = self.left.interval, self.right.interval
        if left is None or right is None or left.level != right.level:
            return None
        assert self.left.value is not None and self.right.value is not None
        down = math.hypot(max(self.right.value - right.lower, 0.0), max(left.upper - self.left.value, 0.0))
        up = math.hypot(max(right.upper - self.right.value, 0.0), max(self.left.value - left.lower, 0.0))
        return Interval(lower=self.difference - down, upper=self.difference + up, level=left.level)

    def change(self) -> str:
        """Return the difference as read: a percentage, or a difference where a percentage says nothing."""
        if self.difference == 0:
            return "same"
        if self.ratio is not None:
            return f"{signed(100 * (self.ratio - 1), 3)} %"
        return signed(self.difference)


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate of either run; None where the other has no such one."""

    dimension: Dimension
    name: str
    left: Measure | None
    right: Measure | None

    @property
    def pair(self) -> Pair | None:
        """Return both figures where both were measured."""
        if self.left is None or self.right is None or self.left.value is None or self.right.value is None:
            return None
        return Pair(self.left, self.right)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs; `pairs` in the order of the dimensions, gates first, predictions last."""

    facts: tuple[Fact, ...]
    pairs: tuple[Pair, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    gates: tuple[Gate, ...] = ()
    strategy: tuple[Fact, ...] = ()
    """How the two candidates are stored and run."""
    environment: tuple[Fact, ...] = ()
    """What the two runs ran on."""
    warnings: tuple[str, ...] = ()
    """Why figures of the two runs do not say the same; empty where they are comparable."""

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
        gates=_gates(left, right),
        strategy=strategy_facts(left, right),
        environment=environment_facts(left, right),
        warnings=doubts(left, right),
    )


def _gates(left: Report, right: Report) -> tuple[Gate, ...]:
    """Return every gate of either run, in the order of the dimensions."""
    lefts, rights = ({(it.dimension, it.name): it for it in report.measures if it.verdict} for report in (left, right))
    keys = sorted(dict.fromkeys((*lefts, *rights)), key=lambda key: list(Dimension).index(key[0]))
    return tuple(Gate(dimension, name, lefts.get((dimension, name)), rights.get((dimension, name))) for dimension, name in keys)


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


def gate_cells(gate: Gate) -> tuple[str, str, str, str, str]:
    """Return name with limit, both values with their intervals and verdicts, the difference, and its interval."""
    pair, measures = gate.pair, [it for it in (gate.left, gate.right) if it is not None]
    limits = sorted({_limit(it) for it in measures if it.limit is not None})
    return (
        label(gate.name) + (f" ({' / '.join(limits)})" if limits else ""),
        _gate_value(gate.left),
        _gate_value(gate.right),
        pair.change() if pair else "–",
        span(pair.difference_interval, measures[0].unit) if pair else "–",
    )


def _limit(measure: Measure) -> str:
    return f"{'≥' if measure.higher_is_better else '≤'} {quantity(measure.limit, measure.unit)}"


def _gate_value(measure: Measure | None) -> str:
    return "no such gate" if measure is None else f"{_value(measure)} {measure.verdict}"


def _value(measure: Measure) -> str:
    value = quantity(measure.value, measure.unit)
    return value if measure.interval is None else f"{value} ({span(measure.interval, measure.unit)})"
