"""Which format each layer group gets: the least predicted damage that fits a byte budget, exactly.

A multiple-choice knapsack (one format per group). The solver extends the set of non-dominated (bytes, damage)
states group by group, so it is exact for any sizes, and every budget's optimum lies on the final set.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store a group: its bytes and its predicted damage in nats."""

    format: str
    num_bytes: int
    damage_nats: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """The chosen option of every group, in order, with the sums."""

    formats: tuple[str, ...]
    num_bytes: int
    damage_nats: float


@dataclass(frozen=True, slots=True)
class _States:
    """Non-dominated partial sums, bytes rising and damage falling, and how each came about."""

    num_bytes: NDArray[np.int64]
    damage: NDArray[np.float64]
    parent: NDArray[np.int64]
    option: NDArray[np.int64]


def allocate(groups: tuple[tuple[Option, ...], ...], budget_bytes: int) -> Allocation:
    """Return the assignment of least total damage whose bytes are at most `budget_bytes`; ties go to fewer bytes.

    Raises:
        UnsupportedError: even the smallest option of every group exceeds the budget.
    """
    smallest = [min(option.num_bytes for option in options) for options in groups]
    if sum(smallest) > budget_bytes:
        raise _too_small(budget_bytes, sum(smallest))
    history = _states(groups, budget_bytes)
    return _trace_back(groups, history, -1)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Every assignment that no other beats in both bytes and damage; bytes rise and damage falls along it."""

    num_bytes: NDArray[np.int64]
    damage_nats: NDArray[np.float64]
    _groups: tuple[tuple[Option, ...], ...]
    _history: list[_States]

    def at(self, position: int) -> Allocation:
        """Return the assignment behind one point."""
        return _trace_back(self._groups, self._history, position)

    def within_bytes(self, budget_bytes: int) -> Allocation:
        """Return the least damage for at most `budget_bytes`; law: equal to `allocate(groups, budget_bytes)`.

        Raises:
            UnsupportedError: even the smallest point exceeds the budget.
        """
        position = int(np.searchsorted(self.num_bytes, budget_bytes, side="right")) - 1
        if position < 0:
            raise _too_small(budget_bytes, int(self.num_bytes[0]))
        return self.at(position)

    def within_damage(self, limit_nats: float) -> Allocation:
        """Return the fewest bytes for at most `limit_nats`; ties go to less damage.

        Raises:
            UnsupportedError: even the least harmful point exceeds the limit.
        """
        within = np.flatnonzero(self.damage_nats <= limit_nats)
        if not within.size:
            least = self.damage_nats[-1]
            raise UnsupportedError(f"the allowed formats do {least:.4g} nats of damage at least; the limit is {limit_nats:.4g}")
        return self.at(int(within[0]))


def frontier(groups: tuple[tuple[Option, ...], ...]) -> Frontier:
    """Return the optimum of every budget from one run."""
    history = _states(groups, sum(max(option.num_bytes for option in options) for options in groups))
    if not history:
        return Frontier(np.zeros(1, np.int64), np.zeros(1, np.float64), groups, history)
    return Frontier(history[-1].num_bytes, history[-1].damage, groups, history)


def allocate_within_damage(groups: tuple[tuple[Option, ...], ...], limit_nats: float) -> Allocation:
    """Return the assignment of fewest bytes whose total damage is at most `limit_nats`; ties go to less damage.

    Raises:
        UnsupportedError: even the least harmful option of every group exceeds the limit.
    """
    return frontier(groups).within_damage(limit_nats)


def _too_small(budget_bytes: int, least_bytes: int) -> UnsupportedError:
    return UnsupportedError(
        f"a budget of {budget_bytes} bytes cannot hold the layers: the smallest allowed formats need {least_bytes} bytes; "
        "raise bits_budget, allow a smaller format, or keep fewer layers in full precision"
    )


def _states(groups: tuple[tuple[Option, ...], ...], budget_bytes: int) -> list[_States]:
    """Return the non-dominated partial assignments after every group, as far as they can still fit the budget."""
    smallest = [min(option.num_bytes for option in options) for options in groups]
    nothing = np.zeros(1, np.int64)
    states = _States(nothing, np.zeros(1, np.float64), nothing, nothing)
    history = []
    room_after = budget_bytes - sum(smallest)
    for options, least in zip(groups, smallest, strict=True):
        room_after += least
        # what is left for this and earlier groups once all later ones take their smallest option
        states = _extend(states, options, room_after)
        history.append(states)
    return history


def _extend(states: _States, options: tuple[Option, ...], budget_bytes: int) -> _States:
    """Add one group to every state and keep what is non-dominated and still fits."""
    num_bytes = np.add.outer([option.num_bytes for option in options], states.num_bytes).ravel()
    damage = np.add.outer([option.damage_nats for option in options], states.damage).ravel()
    fits = np.flatnonzero(num_bytes <= budget_bytes)
    order = fits[np.lexsort((damage[fits], num_bytes[fits]))]
    lowest_before = np.concatenate(([np.inf], np.minimum.accumulate(damage[order])[:-1]))
    kept = order[damage[order] < lowest_before]
    option, parent = np.divmod(kept, len(states.num_bytes))
    return _States(num_bytes[kept], damage[kept], parent, option)


def _trace_back(groups: tuple[tuple[Option, ...], ...], history: list[_States], position: int) -> Allocation:
    """Follow one state of the last group back to the first; the last state (-1) has the least damage."""
    if not history:
        return Allocation((), 0, 0.0)
    final = history[-1]
    num_bytes, damage = int(final.num_bytes[position]), float(final.damage[position])
    formats = []
    for options, states in zip(reversed(groups), reversed(history), strict=True):
        formats.append(options[states.option[position]].format)
        position = states.parent[position]
    return Allocation(tuple(reversed(formats)), num_bytes, damage)
