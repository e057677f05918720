"""Reads the options of `bench`: what contradicts itself is refused before anything is sent."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flows.cli.bench_options import Asked, Pacing
from model_optimizer.errors import ConfigError
from model_optimizer.measurement.arrivals import Burst, bursts, poisson, read_trace, steady
from model_optimizer.measurement.openloop import ClosedLoop, OpenLoop
from model_optimizer.measurement.prompts import default_text
from model_optimizer.measurement.samples import ServiceLevel
from model_optimizer.measurement.saturation import SweepPlan
from model_optimizer.spec import Lengths, Traffic
from model_optimizer.traffic.lengths import RequestShape, sample_requests

_DURATION_S = 30.0
_NUM_BODIES = 1024
"""Different prompts where the number of requests is not known before."""


def check(asked: Asked) -> None:
    """Refuse options that contradict each other."""
    pacing = asked.pacing
    ways = {
        "--concurrency": pacing.concurrency is not None,
        "--trace": pacing.trace is not None,
        "--sweep": pacing.sweep,
        "--rate": pacing.rate is not None and not pacing.sweep,
    }
    chosen = [name for name, given in ways.items() if given]
    if len(chosen) != 1:
        raise ConfigError(f"give one of {', '.join(ways)}; seen: {' and '.join(chosen) or 'none'}")
    if pacing.sweep:
        SweepPlan(step_s=pacing.step_s, first_per_s=pacing.rate)
        if asked.outputs.samples is not None:
            raise ConfigError("--samples belongs to a single run; a sweep keeps its figures only")
    if pacing.rate is not None and not pacing.rate > 0:
        raise ConfigError(f"--rate is {pacing.rate:g}; it must be above 0")
    if (pacing.arrival == "burst") != bool(pacing.burst):
        raise ConfigError("--arrival burst and --burst RATE,PERIOD,LENGTH go together; give both or neither")
    if pacing.duration_s is not None and (pacing.sweep or pacing.trace is not None or (pacing.rate and pacing.requests)):
        raise ConfigError("--duration belongs to --concurrency, or to --rate without --requests; a sweep takes --step")
    if pacing.requests is not None and (pacing.sweep or pacing.trace is not None):
        raise ConfigError("--requests belongs to --rate and --concurrency; a sweep takes --step, a trace has its own number")


def traffic(asked: Asked) -> tuple[OpenLoop | ClosedLoop | None, tuple[RequestShape, ...]]:
    """Return when requests are sent and how long each is."""
    pacing = asked.pacing
    if pacing.trace is not None:
        trace = read_trace(pacing.trace, speed=pacing.speed)
        return OpenLoop(trace.offsets_ns), trace.shapes
    lengths = Traffic(
        prompt_tokens=_lengths("--prompt-tokens", asked.prompt_tokens),
        output_tokens=_lengths("--output-tokens", asked.output_tokens),
    )
    arrivals: OpenLoop | ClosedLoop | None = None
    num = pacing.requests or _NUM_BODIES
    if pacing.concurrency is not None:
        duration_s = pacing.duration_s if pacing.duration_s or pacing.requests else _DURATION_S
        arrivals = ClosedLoop(pacing.concurrency, num_requests=pacing.requests, duration_s=duration_s)
    elif not pacing.sweep:
        arrivals = OpenLoop(offsets(pacing, asked.seed))
        num = arrivals.offsets_ns.size
    longest = lengths.prompt_tokens.max + lengths.output_tokens.max
    return arrivals, sample_requests(lengths, max(2, longest), num, asked.seed)


def offsets(pacing: Pacing, seed: int) -> NDArray[np.int64]:
    rate = pacing.rate
    assert rate is not None, "checked before"
    duration_s = pacing.duration_s or (pacing.requests / rate if pacing.requests else _DURATION_S)
    if pacing.arrival == "steady":
        return steady(rate, duration_s)
    if pacing.arrival == "burst":
        try:
            burst = Burst(*(float(part) for part in pacing.burst.split(",")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--burst is {pacing.burst!r}; give RATE,PERIOD,LENGTH, e.g. 50,10,2") from error
        return bursts(rate, burst, duration_s, seed)
    return poisson(rate, duration_s, seed)


def _lengths(option: str, text: str) -> Lengths:
    try:
        numbers = [int(part) for part in text.split(",")]
        if len(numbers) == 1:
            numbers *= 3
        p50, p95, longest = numbers
        return Lengths(p50=p50, p95=p95, max=longest)
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}; give one number of tokens or rising P50,P95,MAX, e.g. 64,256,512") from error


def extra_fields(text: str) -> dict[str, object]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--body is {text[:60]!r}; give a JSON object of further fields")
    return fields


def prompt_text(path: Path | None) -> str:
    if path is None:
        return default_text()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}; give a text file") from error


def service_level(stated: tuple[str, ...]) -> ServiceLevel | None:
    known = ("ttft_ms", "tpot_ms", "end_to_end_ms")
    limits = dict[str, float]()
    for pair in stated:
        name, _, value = pair.partition("=")
        try:
            limits[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"--sla {pair!r} is no KEY=MS, e.g. ttft_ms=500") from error
        if name not in known or not limits[name] > 0:
            raise ConfigError(f"--sla {pair!r}: allowed are {', '.join(known)}, each above 0")
    return ServiceLevel(limits.get("ttft_ms"), limits.get("tpot_ms"), limits.get("end_to_end_ms")) if limits else None


def words(asked: Asked) -> str:
    """Say how requests are paced."""
    pacing = asked.pacing
    if pacing.sweep:
        return f"open loop at rising rates, {pacing.arrival}, {pacing.step_s:g} s each"
    if pacing.trace is not None:
        return f"open loop, trace {pacing.trace.name} at {pacing.speed:g} times its speed"
    if pacing.concurrency is not None:
        return f"closed loop, {pacing.concurrency} in flight"
    burst = f" with bursts {pacing.burst}" if pacing.burst else ""
    return f"open loop, {pacing.arrival} at {pacing.rate:g} requests/s{burst}"
