"""Alarms that go off on time: asyncio's own are rounded up to whole milliseconds, which is more than a dispatch may be late.

On Linux the kernel's timerfd wakes the loop to within its timer slack (tens of microseconds); elsewhere asyncio's timer serves.
"""

import asyncio
import ctypes
import heapq
import os
import sys
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_NS_PER_S = 1_000_000_000


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _TimerSpec(ctypes.Structure):
    _fields_ = [("interval", _TimeSpec), ("value", _TimeSpec)]


class Alarm:
    """Call `due` on the loop once the clock of `time.perf_counter_ns()` has passed the time that was set; one time at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, due: Callable[[], None]):
        self._loop = loop
        self._due = due
        self._handle: asyncio.TimerHandle | None = None
        self._library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = -1
        if self._library is not None:
            self._spec = _TimerSpec()
            self._reference = ctypes.byref(self._spec)
            self._fd = self._library.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create failed")
            loop.add_reader(self._fd, self._fired)

    def set(self, at_ns: int) -> None:
        """Go off at `at_ns`, or as soon as possible where that has passed; a time set before is forgotten."""
        wait_ns = max(1, at_ns - time.perf_counter_ns())
        if self._library is not None:
            self._spec.value.seconds, self._spec.value.nanoseconds = divmod(wait_ns, _NS_PER_S)
            self._library.timerfd_settime(self._fd, 0, self._reference, None)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(wait_ns / _NS_PER_S, self._due)

    def close(self) -> None:
        """Never go off again."""
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set anew between going off and being read
            return
        self._due()


class Agenda:
    """Calls at given times, all on one alarm, in the order of their times."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._alarm = Alarm(loop, self._run)
        self._entries: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, at_ns: int, call: Callable[[], None]) -> None:
        """Make a call once `time.perf_counter_ns()` has passed `at_ns`; never from within this one."""
        self._number += 1
        heapq.heappush(self._entries, (at_ns, self._number, call))
        if self._entries[0][1] == self._number:
            self._alarm.set(at_ns)

    def close(self) -> None:
        """Forget what is left."""
        self._entries.clear()
        self._alarm.close()

    def _run(self) -> None:
        entries = self._entries
        now = time.perf_counter_ns()
        while entries and entries[0][0] <= now:
            heapq.heappop(entries)[2]()
        if entries:
            self._alarm.set(entries[0][0])
