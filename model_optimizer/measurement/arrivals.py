"""When requests are due: offsets from the start of a run, fixed before it begins so that no answer can move them.

Shapes: N requests.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError
from model_optimizer.traffic.lengths import RequestShape

NS_PER_S = 1_000_000_000
MAX_REQUESTS = 2_000_000
"""A run keeps every sample in memory."""


@dataclass(frozen=True, slots=True)
class Burst:
    """A rate that rises to `rate_per_s` for `length_s` at the end of every `period_s`."""

    rate_per_s: float
    period_s: float
    length_s: float


def steady(rate_per_s: float, duration_s: float) -> NDArray[np.int64]:
    """Return evenly spaced offsets in ns [N], the first at 0.

    Raises:
        ConfigError: a rate or duration that is not positive, or more requests than a run can keep.
    """
    num = _expected(rate_per_s, duration_s)
    return np.asarray(np.rint(np.arange(num) * (NS_PER_S / rate_per_s)), dtype=np.int64)


def poisson(rate_per_s: float, duration_s: float, seed: int) -> NDArray[np.int64]:
    """Return the offsets in ns [N] of a Poisson process over `duration_s`; the same arguments give the same offsets.

    Raises:
        ConfigError: as for `steady`.
    """
    _expected(rate_per_s, duration_s)
    generator = np.random.default_rng(seed)
    num = generator.poisson(rate_per_s * duration_s)
    # given their number, the arrivals of a Poisson process are independent and uniform
    return np.sort(np.rint(generator.random(num) * duration_s * NS_PER_S).astype(np.int64))


def bursts(rate_per_s: float, burst: Burst, duration_s: float, seed: int) -> NDArray[np.int64]:
    """Return Poisson offsets in ns [N] at a steady rate with the bursts on top of it.

    Raises:
        ConfigError: as for `steady`, or a burst that is longer than its period or no faster than the steady rate.
    """
    if not 0 < burst.length_s < burst.period_s or burst.rate_per_s <= rate_per_s:
        raise ConfigError(
            f"a burst is shorter than its period and faster than the steady rate of {rate_per_s:g}/s; "
            f"seen: {burst.rate_per_s:g}/s for {burst.length_s:g} s of every {burst.period_s:g} s"
        )
    everywhere = poisson(burst.rate_per_s, duration_s, seed)
    within_s = (everywhere / NS_PER_S) % burst.period_s
    kept = np.random.default_rng([seed, 1]).random(everywhere.size) < rate_per_s / burst.rate_per_s  # thinned to the steady rate
    return everywhere[(within_s >= burst.period_s - burst.length_s) | kept]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as they really came."""

    offsets_ns: NDArray[np.int64]
    """[N] rising, the first at 0."""
    shapes: tuple[RequestShape, ...]


_TIME_NAMES = {"timestamp_s": 1e9, "arrival_s": 1e9, "arrived_at": 1e9, "timestamp_ms": 1e6, "arrival_ms": 1e6, "timestamp": 1e6}
"""Field -> ns of its unit. Source: Vidur writes `arrived_at` in seconds, Mooncake `timestamp` in milliseconds."""
_PROMPT_NAMES = ("prompt_tokens", "input_tokens", "input_length", "num_prefill_tokens")
_OUTPUT_NAMES = ("output_tokens", "completion_tokens", "output_length", "num_decode_tokens")


def read_trace(path: Path, *, speed: float = 1.0) -> Trace:
    """Read a trace of one JSON object a line, each with a time and two token counts; `speed` 2 replays it twice as fast.

    Raises:
        ConfigError: names the line without a time or count, or with a time before the last one.
    """
    import json

    if not speed > 0:
        raise ConfigError(f"a trace is replayed at a speed above 0; seen: {speed:g}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}; give a JSONL file") from error
    times_ns, shapes = list[float](), list[RequestShape]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"trace {path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{place}: no JSON ({error}); one object a line is read") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: {line[:60]!r} is no object; one object a line is read")
        time_name = next((name for name in _TIME_NAMES if name in row), None)
        at = row[time_name] if time_name else None
        if time_name is None or not isinstance(at, int | float) or isinstance(at, bool) or not np.isfinite(at):
            raise ConfigError(f"{place}: no time; one of {', '.join(_TIME_NAMES)} is read, as a number")
        times_ns.append(at * _TIME_NAMES[time_name])
        if len(times_ns) > 1 and times_ns[-1] < times_ns[-2]:
            raise ConfigError(f"{place}: {time_name} {at:g} is before the line above; sort the trace by time")
        shapes.append(RequestShape(_count(row, _PROMPT_NAMES, place), _count(row, _OUTPUT_NAMES, place)))
    if not shapes:
        raise ConfigError(f"trace {path} has no requests")
    offsets = np.array(times_ns, dtype=np.float64)
    return Trace(np.rint((offsets - offsets[0]) / speed).astype(np.int64), tuple(shapes))


def _count(row: dict[str, object], names: tuple[str, ...], place: str) -> int:
    value = next((row[name] for name in names if name in row), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{place}: {names[0]} is {value!r}, not a count of tokens from 1; known: {', '.join(names)}")
    return value


def _expected(rate_per_s: float, duration_s: float) -> int:
    if not (rate_per_s > 0 and duration_s > 0):
        raise ConfigError(f"arrivals need a rate and a duration above 0; seen: {rate_per_s:g}/s for {duration_s:g} s")
    num = round(rate_per_s * duration_s)
    if not 1 <= num <= MAX_REQUESTS:
        raise ConfigError(
            f"{rate_per_s:g} requests/s for {duration_s:g} s are {num} requests; from 1 to {MAX_REQUESTS:,} are allowed, "
            "change the rate or the duration"
        )
    return num
