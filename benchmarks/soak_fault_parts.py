"""Twelve faults that are put into the real native runtime: its own objects are spoiled, nothing is replaced by a stand-in.

Each takes an open runtime and the soak's clock (hours of traffic tested so far), and spoils the runtime so that the fault
shows later, as it would: a leak with every request, a corrupt page now and then from some hour on, a crash at noon.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from model_optimizer.runtimes.torch import engine
from model_optimizer.runtimes.torch.engine import NativeRuntime
from model_optimizer.runtimes.torch.sequence import Running
from model_optimizer.verification.soak import TrafficClock

Fault = Callable[[NativeRuntime, TrafficClock], None]

NOON_H = 12.0
"""What happens at one moment happens here."""
LEAK_PER_REQUEST_BYTES = 16 * 1024
LEAK_PER_HOUR_BYTES = 400 * 1024
BLOCKS_PER_REQUEST, BLOCK_BYTES, REST_BYTES = 20, 4080, 64
"""Buffers that are shrunk to a rest: each rest keeps its page of the heap."""
REQUESTS_PER_FD = 4
REQUESTS_PER_DOUBLE_FREE = 20
STEPS_PER_CORRUPTION = 20
SCALE_ERROR = 1.01
SLOWER_BY_RATIO = 2.0
"""At hour 24 a step takes so much more time of the CPU, as a share of its own: a chip at a third of its clock rate."""
CLOCK_JUMP_NS = 3600 * 10**9


def leak_per_request(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """Every finished request leaves a buffer behind."""
    held: list[torch.Tensor] = []
    _after_each_request(runtime, lambda _: held.append(torch.ones(LEAK_PER_REQUEST_BYTES // 4)))


def leak_per_hour(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """A timer leaves a buffer behind, however many requests there are."""
    held: list[torch.Tensor] = []
    last = clock.hours

    def tick() -> None:
        nonlocal last
        if (hours := clock.hours - last) > 0:
            held.append(torch.ones(int(LEAK_PER_HOUR_BYTES * hours) // 4))
            last = clock.hours

    _before_each_step(runtime, tick)


def fragmentation(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """Every request's buffers are shrunk to a small rest, and the heap between the rests is of no use for others."""
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.realloc.argtypes = [ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_size_t]
    rests: list[int] = []

    def shrink(_: Running) -> None:
        blocks = [libc.malloc(BLOCK_BYTES) for _ in range(BLOCKS_PER_REQUEST)]
        for block in blocks:
            ctypes.memset(block, 1, BLOCK_BYTES)
        rests.extend(libc.realloc(block, REST_BYTES) for block in blocks)

    _after_each_request(runtime, shrink)


def kv_cross_talk(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """Now and then two requests read and write each other's first page for one step."""
    run = runtime._opened.run
    steps = 0

    def crossed(turns):  # type: ignore[no-untyped-def]
        nonlocal steps
        steps += 1
        if clock.hours < NOON_H or len(turns) < 2 or steps % STEPS_PER_CORRUPTION:
            return run(turns)
        one, two = turns[0].running.pages.pages, turns[1].running.pages.pages
        one[0], two[0] = two[0], one[0]
        try:
            return run(turns)
        finally:
            one[0], two[0] = two[0], one[0]

    runtime._opened.run = crossed  # type: ignore[method-assign]


def double_free(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """Now and then a finished request gives a page back twice."""
    finish, finished = runtime._scheduler.finish, 0

    def twice(running: Running) -> None:
        nonlocal finished
        finished += 1
        page = running.pages.pages[-1]
        finish(running)
        if clock.hours >= NOON_H and finished % REQUESTS_PER_DOUBLE_FREE == 0:
            runtime._pool.pages.free.append(page)

    runtime._scheduler.finish = twice  # type: ignore[method-assign]


def scale_mutation(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """At noon the scales of one layer's packed weights change by a hundredth."""
    layer = runtime._opened.model._layers[0]
    scales = next(part for suffix, part in layer.down.weight.parts.items() if "scale" in suffix)  # type: ignore[attr-defined]
    _once_at_noon(runtime, clock, lambda: scales.mul_(SCALE_ERROR))


def nan_at_step(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """At noon the keys and values of a running request become not a number."""
    _once_at_noon(runtime, clock, lambda: runtime._opened.poison(_running(runtime)[0].pages.pages[:1]))


def slow_down(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """Every hour each step takes a little longer, as on a chip that becomes hot."""
    run = runtime._opened.run

    def slower(turns):  # type: ignore[no-untyped-def]
        start_s = time.process_time()
        choices = run(turns)
        took_s = time.process_time() - start_s
        while time.process_time() < start_s + took_s * (1 + SLOWER_BY_RATIO * clock.hours / 24):
            pass
        return choices

    runtime._opened.run = slower  # type: ignore[method-assign]


def fd_leak(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """Some requests leave an open file behind."""
    finished = 0

    def leave_open(_: Running) -> None:
        nonlocal finished
        finished += 1
        if finished % REQUESTS_PER_FD == 0:
            os.open(os.devnull, os.O_RDONLY)

    _after_each_request(runtime, leave_open)


def clock_jump(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """At noon the clock that stamps tokens jumps by an hour."""
    real = time.perf_counter_ns

    def jumping_ns() -> int:
        return real() + CLOCK_JUMP_NS * (clock.hours >= NOON_H)

    engine.time = SimpleNamespace(perf_counter_ns=jumping_ns)  # type: ignore[assignment]


def page_corruption(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """From noon on, every few steps the keys of one used page change their sign."""
    steps = 0

    def corrupt() -> None:
        nonlocal steps
        steps += 1
        victims = [running for running in _running(runtime) if running.num_computed]
        if clock.hours >= NOON_H and steps % STEPS_PER_CORRUPTION == 0 and victims:
            page = victims[-1].pages.pages[0]
            runtime._opened._paged.storage._keys[0].values_PSHD[page].neg_()  # type: ignore[attr-defined]

    _before_each_step(runtime, corrupt)


def crash(runtime: NativeRuntime, clock: TrafficClock) -> None:
    """At noon the process dies by a segmentation fault."""
    _once_at_noon(runtime, clock, lambda: os.kill(os.getpid(), signal.SIGSEGV))


DETERMINISM = frozenset({"wrong_scores", "changed_bits", "failed_trials"})
"""Tokens scored anew, fixed prompts to the bit, one request alone before and after many: which one it hits is chance."""
FAULTS: dict[str, tuple[Fault, frozenset[str]]] = {
    "leak-per-request": (leak_per_request, frozenset({"heap_growth"})),
    "leak-per-hour": (leak_per_hour, frozenset({"heap_growth"})),
    "fragmentation": (fragmentation, frozenset({"fragmentation_growth"})),
    "kv-cross-talk": (kv_cross_talk, DETERMINISM),
    "double-free": (double_free, frozenset({"page_faults"})),
    "scale-mutation": (scale_mutation, frozenset({"drifted_samples"})),
    "nan-at-step": (nan_at_step, frozenset({"non_finite"})),
    "slow-down": (slow_down, frozenset({"slow_down", "cpu_slow_down"})),
    "fd-leak": (fd_leak, frozenset({"open_files_growth"})),
    "clock-jump": (clock_jump, frozenset({"clock_faults"})),
    "page-corruption": (page_corruption, DETERMINISM),
    "crash": (crash, frozenset({"crashes"})),
}
"""Each fault with the measures of which at least one must reject: found by the wrong one would be luck."""


def _running(runtime: NativeRuntime) -> list[Running]:
    return runtime._scheduler._running


def _after_each_request(runtime: NativeRuntime, act: Callable[[Running], object]) -> None:
    finish = runtime._scheduler.finish

    def finish_and_act(running: Running) -> None:
        finish(running)
        act(running)

    runtime._scheduler.finish = finish_and_act  # type: ignore[method-assign]


def _before_each_step(runtime: NativeRuntime, act: Callable[[], object]) -> None:
    advance = runtime.advance

    def act_and_advance():  # type: ignore[no-untyped-def]
        act()
        return advance()

    runtime.advance = act_and_advance  # type: ignore[method-assign]


def _once_at_noon(runtime: NativeRuntime, clock: TrafficClock, act: Callable[[], object]) -> None:
    done = False

    def act_once() -> None:
        nonlocal done
        if not done and clock.hours >= NOON_H and any(running.num_computed for running in _running(runtime)):
            done = True
            act()

    _before_each_step(runtime, act_once)
