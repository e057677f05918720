"""How fast the load generator is on one core, and how true its percentiles are; peers in the same run."""

import contextlib
import json
import os
import shutil
import statistics
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence import Figure
from benchmarks.load_generator_peers import PATH, PeerFailed, PeerRun, run_guidellm, run_wrk
from benchmarks.load_generator_truth import RATIOS, relative_errors, true_latency_s
from model_optimizer.measurement.arrivals import poisson
from model_optimizer.measurement.http_client import Endpoint
from model_optimizer.measurement.openloop import ClosedLoop, LoadPlan, LoadRun, OpenLoop, run_load
from model_optimizer.measurement.paired import ratio_of_pairs
from model_optimizer.measurement.scripted_server import Script, Stall, running

OURS_CORE, SERVER_CORE = "0", "1"
OPEN_RATES = (5000.0, 10_000.0, 20_000.0)
PAUSE = Stall(at_s=15.0, length_s=1.0)
RATE_PER_S = 200.0
MEDIAN_MS, SPREAD = 50.0, 0.5
"""Of the lognormal delays that the server is told to keep."""
NUM_DELAYS = 4096
_PEER_CASES = ("wrk", "guidellm", "guidellm-scheduled")
CLOSED_CONNECTIONS = 11
"""A closed loop that sends about as many requests as the open one while nothing stalls."""


@dataclass(frozen=True)
class Setting:
    peers: Path
    rounds: int
    seconds: float
    accuracy_seconds: float
    num_servers: int
    num_busy: int


def on_core(core: str) -> tuple[str, ...]:
    """Return the prefix that keeps a command on one core, where that can be said."""
    return ("taskset", "-c", core) if shutil.which("taskset") and (os.cpu_count() or 1) > 1 else ()


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Keep this process on its core while the body runs."""
    before = os.sched_getaffinity(0)
    if on_core(OURS_CORE):
        os.sched_setaffinity(0, {int(OURS_CORE)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def body(max_tokens: int, *, stream: bool, seed: int | None = None) -> bytes:
    asked: dict[str, object] = {"model": "scripted", "prompt": "word", "max_tokens": max_tokens, "stream": stream}
    return json.dumps(asked if seed is None else {**asked, "seed": seed}).encode()


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def throughput(setting: Setting) -> list[Figure]:
    """Return requests and events per second on one core, ours and the peers in turns, and the ratios."""
    rates: dict[str, list[float]] = {name: [] for name in ("ours", "wrk", "guidellm")}
    open_loop: dict[float, list[LoadRun]] = {rate: [] for rate in OPEN_RATES}
    burst, paced = list[LoadRun](), list[LoadRun]()
    reasons = dict[str, str]()
    with running(Script(), on_core(SERVER_CORE)) as url:
        endpoint = Endpoint.of(url, PATH)
        arms: dict[str, Callable[[], float]] = {
            "ours": lambda: _closed(endpoint, 64, setting.seconds, 4, stream=False).samples.requests_per_s(),
            "wrk": lambda: _peer_rate(reasons, "wrk", lambda: _wrk(url, 64, setting.seconds)),
            "guidellm": lambda: _peer_rate(
                reasons,
                "guidellm",
                lambda: run_guidellm(
                    setting.peers, url, "kind=throughput,max_concurrency=64", seconds=setting.seconds, max_tokens=4
                ),
            ),
        }
        for number in range(setting.rounds):
            for name in list(arms)[:: 1 if number % 2 == 0 else -1]:
                if name not in reasons and (rate := arms[name]()) > 0:
                    rates[name].append(rate)
                    tell(f"throughput {name}: {rate:.0f} requests/s")
            for wanted, found in open_loop.items():
                found.append(_offered(endpoint, wanted, setting.seconds))
            burst.append(_closed(endpoint, 16, setting.seconds, 256, stream=True))
    with running(Script(itl_ms=(0.5,)), on_core(SERVER_CORE)) as url:
        for _ in range(setting.rounds):
            paced.append(_closed(Endpoint.of(url, PATH), 32, setting.seconds, 256, stream=True))
    figures = [_rate_figure(name, "unary_req_per_s", found) for name, found in rates.items() if found]
    figures += [Figure(name, "unary_req_per_s", None, "req/s", reason=reason[:200]) for name, reason in reasons.items()]
    for wanted, runs in open_loop.items():
        figures += _open_figures(f"ours-open-{wanted:g}", runs)
    figures += [*_event_figures("ours-together", burst), *_event_figures("ours-one-by-one", paced)]
    for name in ("wrk", "guidellm"):
        if len(rates[name]) == len(rates["ours"]) >= 2:
            ratio = ratio_of_pairs(rates["ours"], rates[name], seed=0)
            figures.append(
                Figure(
                    f"vs-{name}",
                    "ratio_vs_peer",
                    ratio.value,
                    "ratio",
                    ratio.interval.lower,
                    ratio.interval.upper,
                    ratio.num_pairs,
                )
            )
    return figures


def _closed(endpoint: Endpoint, concurrency: int, seconds: float, max_tokens: int, *, stream: bool) -> LoadRun:
    with pinned():
        arrivals = ClosedLoop(concurrency, duration_s=seconds)
        run = run_load(endpoint, LoadPlan([body(max_tokens, stream=stream)], arrivals, stream))
    assert not run.reasons, run.reasons
    return run


def _offered(endpoint: Endpoint, rate_per_s: float, seconds: float) -> LoadRun:
    """Run an open loop at a rate that the server takes at once."""
    with pinned():
        offsets = poisson(rate_per_s, seconds, int(rate_per_s))
        run = run_load(endpoint, LoadPlan([body(4, stream=False)], OpenLoop(offsets), stream=False))
    tell(f"open loop at {rate_per_s:g}/s: {run.samples.requests_per_s():.0f}/s, {run.health.limits}")
    return run


def _open_figures(case: str, runs: list[LoadRun]) -> list[Figure]:
    """Return what came of a rate that was asked for, and how late the generator sent."""
    late_ms = [float(np.quantile(run.samples.dispatch_delay_ms(), 0.99)) for run in runs]
    return [
        _rate_figure(case, "unary_req_per_s", [run.samples.requests_per_s() for run in runs]),
        Figure(case, "dispatch_p99_ms", statistics.median(late_ms), "ms", min(late_ms), max(late_ms), len(late_ms)),
    ]


def _wrk(url: str, connections: int, seconds: float) -> PeerRun:
    asked = body(4, stream=False).decode()
    return run_wrk(url + PATH, asked, connections=connections, seconds=seconds, prefix=on_core(OURS_CORE))


def _peer_rate(reasons: dict[str, str], name: str, run: Callable[[], PeerRun]) -> float:
    try:
        return run().requests_per_s
    except PeerFailed as error:
        reasons[name] = str(error)
        tell(f"{name}: {error}")
        return 0.0


def _rate_figure(case: str, metric: str, found: list[float]) -> Figure:
    unit = "events/s" if "events" in metric else "req/s"
    return Figure(case, metric, statistics.median(found), unit, min(found), max(found), len(found))


def _event_figures(case: str, runs: list[LoadRun]) -> list[Figure]:
    """Return events per second, and per second of the generator's own CPU time, which a busy machine changes less."""
    rates = [run.num_events / run.samples.wall_s() for run in runs]
    own = [rate / run.health.cpu_ratio for rate, run in zip(rates, runs, strict=True)]
    tell(f"{case}: {[round(rate) for rate in rates]} events/s")
    return [_rate_figure(case, "sse_events_per_s", rates), _rate_figure(f"{case}-per-cpu-s", "sse_events_per_s", own)]


def accuracy(setting: Setting) -> list[Figure]:
    """Return how far percentiles are from the truth while the server stands still for a second once."""
    delays_ms = tuple(np.random.default_rng(0).lognormal(np.log(MEDIAN_MS), SPREAD, NUM_DELAYS).tolist())
    errors: dict[str, list[dict[float, float]]] = {name: [] for name in ("ours-unary", "ours-stream", *_PEER_CASES)}
    lateness, limited, reasons = list[float](), 0, dict[str, str]()
    for number in range(setting.rounds):
        for stream in (False, True):
            script = Script(ttft_ms=delays_ms, itl_ms=(5.0,) if stream else (0.0,), stalls=(PAUSE,))
            with running(script, on_core(SERVER_CORE)) as url:
                run = _open(url, setting.accuracy_seconds, number, stream=stream)
                lateness.append(_server_lateness_ms(url))
            truth_ms = 1e3 * _truth_s(run, np.array(delays_ms) / 1e3, 7 * 0.005 if stream else 0.0)
            name = "ours-stream" if stream else "ours-unary"
            errors[name].append(relative_errors(run.samples.end_to_end_ms(), truth_ms))
            limited += run.health.limited
            tell(f"{name}: {errors[name][-1]}, server late by {lateness[-1]:.3g} ms at P99, limits {run.health.limits}")
            if not stream:
                for peer, found in _peer_percentiles(setting, delays_ms, reasons).items():
                    told = {ratio: abs(value / float(np.quantile(truth_ms, ratio)) - 1) for ratio, value in found.items()}
                    errors[peer].append(told)
                    tell(f"{peer}: {told}")
    figures = [figure for name, found in errors.items() if found for figure in _error_figures(name, found)]
    figures += [Figure(name, "percentile_error_ratio", None, "ratio", reason=reason[:200]) for name, reason in reasons.items()]
    worst = [max(it.values()) for name in ("ours-unary", "ours-stream") for it in errors[name]]
    figures.append(
        Figure("ours", "percentile_error_ratio", statistics.median(worst), "ratio", min(worst), max(worst), len(worst))
    )
    figures.append(Figure("ours", "generator_limited_ratio", limited / len(worst), "ratio", n=len(worst)))
    figures.append(Figure("scripted-server", "lateness_p99_ms", statistics.median(lateness), "ms", n=len(lateness)))
    return figures


def _open(url: str, seconds: float, seed: int, *, stream: bool) -> LoadRun:
    bodies = [body(8, stream=stream, seed=number) for number in range(NUM_DELAYS)]
    with pinned():
        plan = LoadPlan(bodies, OpenLoop(poisson(RATE_PER_S, seconds, seed)), stream)
        return run_load(Endpoint.of(url, PATH), plan)


def _truth_s(run: LoadRun, delays_s: NDArray[np.float64], rest_s: float) -> NDArray[np.float64]:
    due_s = (run.samples.intended_ns - run.samples.intended_ns[0]) / 1e9
    return true_latency_s(due_s, delays_s[np.arange(due_s.size) % delays_s.size] + rest_s, (PAUSE,))


def _server_lateness_ms(url: str) -> float:
    """Return how late the server's own writes were at P99: what of an error is not the generator's."""
    with urllib.request.urlopen(f"{url}/statistics", timeout=30) as answer:
        return float(json.load(answer)["lateness_p99_ms"])


def _peer_percentiles(setting: Setting, delays_ms: tuple[float, ...], reasons: dict[str, str]) -> dict[str, dict[float, float]]:
    """Return what each peer says of such a server; wrk is a closed loop, GuideLLM is asked for the same rate."""
    seconds, profile = setting.accuracy_seconds, f"kind=poisson,rate={RATE_PER_S:g}"
    arms: dict[str, Callable[[str], PeerRun]] = {
        "wrk": lambda url: _wrk(url, CLOSED_CONNECTIONS, seconds),
        "guidellm": lambda url: run_guidellm(setting.peers, url, profile, seconds=seconds, max_tokens=8),
    }
    found = dict[str, dict[float, float]]()
    for name, run in arms.items():
        if name in reasons:
            continue
        try:
            with running(Script(ttft_ms=delays_ms, stalls=(PAUSE,)), on_core(SERVER_CORE)) as url:
                told = run(url)
            found[name] = told.percentiles_ms
            if told.scheduled_ms:
                found[f"{name}-scheduled"] = told.scheduled_ms
        except PeerFailed as error:
            reasons[name] = str(error)
            tell(f"{name}: {error}")
    return found


def _error_figures(name: str, found: list[dict[float, float]]) -> list[Figure]:
    figures = []
    for ratio in RATIOS:
        values = [it[ratio] for it in found if ratio in it]
        if values:
            case = f"{name}-p{100 * ratio:g}"
            middle = statistics.median(values)
            figures.append(Figure(case, "percentile_error_ratio", middle, "ratio", min(values), max(values), len(values)))
    return figures
