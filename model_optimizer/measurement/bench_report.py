"""What `model-optimizer bench` found, as data: every rendering reads only this."""

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from model_optimizer.measurement.openloop import LoadRun
from model_optimizer.measurement.percentiles import Series, quantile
from model_optimizer.measurement.samples import LoadSamples, RequestStatus, ServiceLevel
from model_optimizer.measurement.saturation import Sweep
from model_optimizer.measurement.self_watch import GeneratorHealth
from model_optimizer.measurement.steady import find_steady_state

RATIOS = (0.5, 0.9, 0.95, 0.99, 0.999)
MAX_SERIES = 1_000_000
"""Beyond it samples are not tested for correlation: their number alone makes intervals narrow."""
MIN_JUDGED = 160
"""Requests from which a run can be called unsteady."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Percentile(_Part):
    """One percentile in ms; None where a failed request stands there, or the sample is too small for a bound."""

    ratio: float
    value: float | None
    lower: float | None
    upper: float | None

    @property
    def name(self) -> str:
        return f"P{100 * self.ratio:g}"


class LatencyFigure(_Part):
    """One kind of latency over all requests or gaps that have it."""

    name: str
    meaning: str
    num_samples: int
    effective_samples: float | None
    """As many independent samples would say as much; None where that was not asked."""
    mean_ms: float | None
    percentiles: tuple[Percentile, ...]
    note: str = ""

    def at(self, ratio: float) -> float | None:
        """Return a percentile's value."""
        return next((it.value for it in self.percentiles if it.ratio == ratio), None)

    @property
    def jitter_ms(self) -> float | None:
        """Return P99 - P50."""
        median, tail = self.at(0.5), self.at(0.99)
        return None if median is None or tail is None else tail - median


class SteadyFigure(_Part):
    """Whether the run settled, and what was cut off before it did."""

    steady: bool
    num_discarded: int
    """Requests from the start that are in no latency figure."""
    discarded_s: float
    reason: str


class GoodputFigure(_Part):
    """Requests within the service level that was stated."""

    level: dict[str, float]
    ratio: float
    requests_per_s: float


class LoadResult(_Part):
    """One run of load."""

    num_requests: int
    statuses: dict[str, int]
    """How requests ended; failures are among them."""
    failures: dict[str, int]
    """By reason."""
    first_fault: str
    wall_s: float
    requests_per_s: float
    """Ended well."""
    output_tok_per_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    num_events: int
    tokens_counted_by: str
    latency: tuple[LatencyFigure, ...]
    steady: SteadyFigure
    goodput: GoodputFigure | None
    timeline: tuple[tuple[float, float | None, float | None, int], ...]
    """(seconds, P50 and P99 in ms of the requests due in that slice, failures among them)."""
    health: GeneratorHealth

    @property
    def num_failed(self) -> int:
        return self.num_requests - self.statuses.get(RequestStatus.OK.name.lower(), 0)

    @property
    def unsteady(self) -> bool:
        """Return whether there were enough requests to say that the run never settled."""
        return not self.steady.steady and self.statuses.get(RequestStatus.OK.name.lower(), 0) >= MIN_JUDGED

    def figure(self, name: str) -> LatencyFigure | None:
        """Return one kind of latency, where there is any."""
        return next((it for it in self.latency if it.name == name), None)


class BenchReport(_Part):
    """One call of `bench`: what was asked, and one run or a sweep."""

    format: str = "bench-report-1"
    target: str
    model: str
    endpoint: str
    stream: bool
    arrivals: str
    """In words."""
    lengths: str
    seed: int
    started_at: str
    version: str
    machine: str
    load: LoadResult | None = None
    sweep: Sweep | None = None
    notes: tuple[str, ...] = ()
    """What was not measured and why, and what the reader must know."""

    @property
    def limits(self) -> tuple[str, ...]:
        """Return why the figures are the generator's own; empty where they are the server's."""
        if self.load is not None:
            return self.load.health.limits
        behind = self.sweep.points[-1].behind if self.sweep is not None and not self.sweep.saturated else ""
        return (behind,) if behind else ()


def summarize(run: LoadRun, *, counted_by: str, level: ServiceLevel | None) -> LoadResult:
    """Return the figures of one run; `counted_by` says who counted tokens, empty where nobody did."""
    samples = run.samples
    counts = {status.name.lower(): samples.count(status) for status in RequestStatus}
    known = run.prompt_tokens[run.prompt_tokens >= 0]
    steady = _steady(samples)
    return LoadResult(
        num_requests=samples.num_requests,
        statuses={name: count for name, count in counts.items() if count},
        failures=dict(run.reasons.most_common(20)),
        first_fault=run.first_fault,
        wall_s=samples.wall_s(),
        requests_per_s=samples.requests_per_s(),
        output_tok_per_s=samples.output_tok_per_s() if counted_by else None,
        prompt_tokens=int(known.sum()) if known.size else None,
        output_tokens=int(samples.num_tokens[samples.ok].sum()) if counted_by else None,
        num_events=run.num_events,
        tokens_counted_by=counted_by or "nobody",
        latency=_figures(samples.select(np.arange(samples.num_requests) >= steady.num_discarded)),
        steady=steady,
        goodput=_goodput(samples, level),
        timeline=_timeline(samples),
        health=run.health,
    )


def _steady(samples: LoadSamples) -> SteadyFigure:
    """Look for a warm-up in the requests that ended well, in the order in which they were due."""
    places = np.flatnonzero(samples.ok & (samples.finished_ns > samples.intended_ns))
    found = find_steady_state(samples.select(np.isin(np.arange(samples.num_requests), places)).end_to_end_ms())
    discarded = int(places[found.num_discarded]) if found.num_discarded else 0
    seconds = float(samples.intended_ns[discarded] - samples.intended_ns.min()) / 1e9 if discarded else 0.0
    return SteadyFigure(steady=found.steady, num_discarded=discarded, discarded_s=seconds, reason=found.reason)


def _figures(samples: LoadSamples) -> tuple[LatencyFigure, ...]:
    num_failed = samples.num_requests - int(samples.ok.sum())
    failed = f"{num_failed} failed requests count as endless" if num_failed else ""
    whole = samples.end_to_end_ms(failures_infinite=True)
    figures = [
        _figure("end_to_end", "due to the end of the answer", whole, failed),
        _figure("ttft", "due to the first token", samples.ttft_ms()),
        _figure("tpot", "mean time per token after the first chunk, per request", samples.tpot_ms()),
        _figure("itl", "between tokens; a chunk's gap is shared by its tokens", samples.itl_ms()),
        _figure("chunk_gap", "between chunks that carried text", samples.chunk_gap_ms()),
        _figure("dispatch_delay", "due to sent: the generator's own lateness", samples.dispatch_delay_ms()),
    ]
    return tuple(figure for figure in figures if figure.num_samples)


def _figure(name: str, meaning: str, values_ms: NDArray[np.float64], note: str = "") -> LatencyFigure:
    finite = values_ms[np.isfinite(values_ms)]
    series = Series.of(values_ms) if 0 < values_ms.size <= MAX_SERIES else None
    return LatencyFigure(
        name=name,
        meaning=meaning,
        num_samples=values_ms.size,
        effective_samples=series.effective_samples if series else None,
        mean_ms=float(finite.mean()) if finite.size else None,
        percentiles=tuple(_percentile(values_ms, series, ratio) for ratio in RATIOS) if values_ms.size else (),
        note=note,
    )


def _percentile(values_ms: NDArray[np.float64], series: Series | None, ratio: float) -> Percentile:
    found = series.quantile(ratio) if series else quantile(values_ms, ratio)
    finite = [bound if bound is not None and np.isfinite(bound) else None for bound in (found.value, found.lower, found.upper)]
    return Percentile(ratio=ratio, value=finite[0], lower=finite[1], upper=finite[2])


def _goodput(samples: LoadSamples, level: ServiceLevel | None) -> GoodputFigure | None:
    if level is None:
        return None
    found = samples.goodput(level)
    stated = {"ttft_ms": level.ttft_ms, "tpot_ms": level.tpot_ms, "end_to_end_ms": level.end_to_end_ms}
    limits = {name: limit for name, limit in stated.items() if limit is not None}
    return GoodputFigure(level=limits, ratio=found.ratio, requests_per_s=found.requests_per_s)


def _timeline(samples: LoadSamples, num_slices: int = 60) -> tuple[tuple[float, float | None, float | None, int], ...]:
    """Cut the run into equal slices by intended start."""
    if samples.num_requests < 2:
        return ()
    due_s = (samples.intended_ns - samples.intended_ns.min()) / 1e9
    edges = np.linspace(0, float(due_s.max()) or 1.0, min(num_slices, max(2, samples.num_requests // 20)) + 1)
    places = np.clip(np.searchsorted(edges, due_s, side="right") - 1, 0, edges.size - 2)
    latency_ms, rows = samples.end_to_end_ms(failures_infinite=True), list[tuple[float, float | None, float | None, int]]()
    for place, edge in enumerate(edges[:-1]):
        within = latency_ms[places == place]
        good = within[np.isfinite(within)]
        median, tail = (float(np.quantile(good, ratio)) if good.size else None for ratio in (0.5, 0.99))
        rows.append((float(edge), median, tail, within.size - good.size))
    return tuple(rows)
