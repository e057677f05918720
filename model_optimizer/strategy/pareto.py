"""Which candidates are dominated and which are feasible: two questions, two flags (X1).

Pure arithmetic over points; knows neither models nor runtimes. A candidate may be non-dominated and
infeasible (the smallest one that ruins the model), or feasible and dominated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model_optimizer.artifacts.measure import Interval


@dataclass(frozen=True, slots=True)
class Objective:
    """One figure to minimise; `interval` is where its true value lies, None when it is exact."""

    name: str
    value: float
    interval: Interval | None = None

    @property
    def lower(self) -> float:
        return self.value if self.interval is None else self.interval.lower

    @property
    def upper(self) -> float:
        return self.value if self.interval is None else self.interval.upper


@dataclass(frozen=True, slots=True)
class Point:
    """One candidate: its objectives, in the same order for every point of a comparison."""

    label: str
    objectives: tuple[Objective, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """A hard constraint on one figure; exactly one of `at_most`, `at_least` is set."""

    name: str
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    def violation(self, value: float) -> str | None:
        """Return what is wrong with `value`, or None; a value equal to the limit is allowed."""
        if self.at_most is not None and value > self.at_most:
            return f"{self.name} {value:.4g} {self.unit} is above the limit {self.at_most:.4g}"
        if self.at_least is not None and value < self.at_least:
            return f"{self.name} {value:.4g} {self.unit} is below the limit {self.at_least:.4g}"
        return None


def dominates(a: Point, b: Point) -> bool:
    """Return whether `a` is no worse than `b` in every objective and better beyond noise in one.

    Better beyond noise means that the intervals do not meet. Law: irreflexive and free of cycles (each
    step lowers one value and raises none), so a set of points always has a non-dominated member.
    """
    pairs = list(zip(a.objectives, b.objectives, strict=True))
    return all(mine.value <= theirs.value for mine, theirs in pairs) and any(mine.upper < theirs.lower for mine, theirs in pairs)


def dominators(points: Sequence[Point]) -> dict[str, str]:
    """Return, for every dominated point, the label of the first point that dominates it.

    Points that are dominated themselves are named only where no other is left.
    """
    raw = {point.label: [other.label for other in points if dominates(other, point)] for point in points}
    return {label: min(others, key=lambda other: len(raw[other])) for label, others in raw.items() if others}


def violations(figures: dict[str, float], limits: Sequence[Limit]) -> str | None:
    """Return every limit that `figures` break, joined by `; `, or None when all hold.

    Raises:
        KeyError: a limit names a figure that was not given (a bug of the caller).
    """
    found = [text for limit in limits if (text := limit.violation(figures[limit.name]))]
    return "; ".join(found) or None
