"""When a KV pool should grow, shrink or be put in order: a state machine over readings, which bring their own clock.

A batch that does not fit cannot run, so nothing waits for one: what counts is how full the pool is and whether requests
wait for pages (X24). Growing asks for steadily high use, shrinking for steadily low use, and between the two marks nothing
happens; each change of direction makes the next one wait twice as long. The runtime applies the orders.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pydantic import Field

from model_optimizer.memory.kv_pool import Occupancy, PoolExhausted
from model_optimizer.spec import Spec


class ResizeRules(Spec):
    """Thresholds of the controller. Source: M6 for 10 batches, +20 %, -10 % and one half; the rest keeps it from flapping."""

    enabled: bool = Field(default=False, description="whether the pool is resized while serving")
    num_batches: int = Field(default=10, ge=1, description="consecutive batches that must agree")
    high_ratio: float = Field(default=0.9, gt=0, le=1, description="used pages over all, from which a batch counts as pressed")
    low_ratio: float = Field(default=0.5, ge=0, lt=1, description="used pages over all, below which a batch counts as slack")
    grow_ratio: float = Field(default=0.2, gt=0, le=1)
    shrink_ratio: float = Field(default=0.1, gt=0, lt=1)
    hold_s: float = Field(default=30.0, ge=0, description="least time before the direction changes; doubles when it does")
    max_hold_s: float = Field(default=1800.0, ge=0)
    quiet_s: float = Field(default=60.0, ge=0, description="time without any request that makes a quiet window")
    scatter_ratio: float = Field(default=0.5, ge=0, le=1, description="scatter seen under load from which a reset is worth it")


class Action(StrEnum):
    GROW = "grow"
    SHRINK = "shrink"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Order:
    """What to do to the pool, and why."""

    action: Action
    num_pages: int
    """Pages afterwards."""
    because: str


@dataclass(frozen=True, slots=True)
class Reading:
    """The pool after one batch."""

    time_s: float
    """A monotonic clock."""
    num_pages: int
    num_used: int
    num_waiting: int
    """Requests that wait for pages, not for a batch slot."""
    scatter_ratio: float = 0.0

    @classmethod
    def of(cls, occupancy: Occupancy, num_waiting: int, time_s: float) -> "Reading":
        return cls(time_s, occupancy.num_pages, occupancy.num_used, num_waiting, occupancy.scatter_ratio)


class ResizablePool(Protocol):
    """What a runtime offers: both calls between two batches, from its own thread."""

    def resize_pool(self, num_pages: int) -> None:
        """Change pages and storage.

        Raises:
            PoolExhausted: more pages are in use; nothing was changed.
        """

    def reset_pool(self) -> None:
        """Forget cached pages and put free ones in order; only called while no sequence is live."""


class PoolController:
    """Counts agreeing batches and gives an order when enough of them do. One pool, one controller."""

    def __init__(self, rules: ResizeRules, min_pages: int, max_pages: int) -> None:
        """Never order fewer than `min_pages` (one longest request) or more than `max_pages` (what the budget allows)."""
        self._rules = rules
        self._min_pages = min_pages
        self._max_pages = max_pages
        self._pressed = self._slack = 0
        self._last: Action | None = None
        self._changed_s = float("-inf")
        self._hold_s = rules.hold_s
        self._quiet_since_s: float | None = None
        self._worst_scatter_ratio = 0.0

    def observe(self, reading: Reading) -> Order | None:
        """Count one batch (or one idle look) and return what is to be done now, if anything."""
        self._count(reading)
        return self._grow(reading) or self._shrink(reading) or self._reset(reading)

    def _count(self, reading: Reading) -> None:
        rules, used_ratio = self._rules, reading.num_used / reading.num_pages
        pressed = reading.num_waiting > 0 or used_ratio >= rules.high_ratio
        slack = not reading.num_waiting and used_ratio < rules.low_ratio
        self._pressed = self._pressed + 1 if pressed else 0
        self._slack = self._slack + 1 if slack else 0
        if reading.num_used or reading.num_waiting:
            self._quiet_since_s = None
            self._worst_scatter_ratio = max(self._worst_scatter_ratio, reading.scatter_ratio)
        elif self._quiet_since_s is None:
            self._quiet_since_s = reading.time_s

    def _grow(self, reading: Reading) -> Order | None:
        target = min(self._max_pages, -int(-reading.num_pages * (1 + self._rules.grow_ratio) // 1))
        if self._pressed < self._rules.num_batches or target <= reading.num_pages or not self._may(Action.GROW, reading.time_s):
            return None
        because = (
            f"{self._pressed} batches in a row used {self._rules.high_ratio:.0%} or had requests waiting "
            f"(now {reading.num_used} of {reading.num_pages} pages, {reading.num_waiting} waiting)"
        )
        return self._order(Action.GROW, target, because, reading.time_s)

    def _shrink(self, reading: Reading) -> Order | None:
        target = max(self._min_pages, int(reading.num_pages * (1 - self._rules.shrink_ratio)))
        if self._slack < self._rules.num_batches or target >= reading.num_pages or not self._may(Action.SHRINK, reading.time_s):
            return None
        if reading.num_used >= self._rules.high_ratio * target:
            return None
        because = (
            f"{self._slack} batches in a row used less than {self._rules.low_ratio:.0%} "
            f"(now {reading.num_used} of {reading.num_pages} pages)"
        )
        return self._order(Action.SHRINK, target, because, reading.time_s)

    def _reset(self, reading: Reading) -> Order | None:
        if self._quiet_since_s is None or reading.time_s - self._quiet_since_s < self._rules.quiet_s:
            return None
        if self._worst_scatter_ratio < self._rules.scatter_ratio or self._rules.scatter_ratio == 0:
            return None
        seen, self._worst_scatter_ratio = self._worst_scatter_ratio, 0.0
        because = f"no request for {reading.time_s - self._quiet_since_s:.0f} s, and page tables were scattered by {seen:.0%}"
        return Order(Action.RESET, reading.num_pages, because)

    def _may(self, action: Action, time_s: float) -> bool:
        """Return whether the direction may be this one now: the same as last time, or long enough after it."""
        return self._last in (None, action) or time_s - self._changed_s >= self._hold_s

    def _order(self, action: Action, num_pages: int, because: str, time_s: float) -> Order:
        rules = self._rules
        if time_s - self._changed_s > 10 * self._hold_s:
            self._hold_s = rules.hold_s
        elif self._last not in (None, action):
            self._hold_s = min(rules.max_hold_s, 2 * self._hold_s)
        self._last, self._changed_s = action, time_s
        self._pressed = self._slack = 0
        return Order(action, num_pages, because)


def apply(order: Order, pool: ResizablePool) -> str:
    """Carry an order out; return an empty string, or why the pool refused (it is as it was, and later readings decide)."""
    if order.action is Action.RESET:
        pool.reset_pool()
        return ""
    try:
        pool.resize_pool(order.num_pages)
    except PoolExhausted as error:
        return str(error)
    return ""
