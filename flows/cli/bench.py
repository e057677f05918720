"""`model-optimizer bench`: loads a server over HTTP, or a bundle that it serves for the time."""

import platform
from collections import deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import psutil
import typer

from flows.cli.bench_options import Asked
from flows.cli.bench_output import LiveProgress, print_report, write_csv
from flows.cli.bench_reading import check, extra_fields, offsets, prompt_text, service_level, traffic, words
from flows.cli.bench_target import endpoint_of, first_model, served
from model_optimizer.errors import ConfigError, MeasurementUnstable
from model_optimizer.measurement.bench_report import BenchReport, LoadResult, summarize
from model_optimizer.measurement.http_client import Endpoint
from model_optimizer.measurement.openloop import ClosedLoop, LoadPlan, LoadRun, Observer, OpenLoop, run_load
from model_optimizer.measurement.prompts import RequestForm, build_bodies, tokenizer_counter
from model_optimizer.measurement.samples import LoadSamples, ServiceLevel
from model_optimizer.measurement.saturation import Sweep, SweepPlan, run_sweep
from model_optimizer.measurement.token_count import TextCounter
from model_optimizer.release.version import package_version
from model_optimizer.reporting.bench_page import bench_page
from model_optimizer.store import write_atomically


def run_bench(asked: Asked) -> None:
    """Load the target as asked, print and write what was found.

    Raises:
        ConfigError: options that contradict each other, no server, or one that refuses the first requests.
        MeasurementUnstable: the generator itself was the bottleneck; the report has been printed.
    """
    check(asked)
    with served(asked) as (url, name):
        endpoint = endpoint_of(url, asked)
        session = Session.prepare(asked, endpoint, asked.model or name or first_model(url, endpoint))
        report, samples = session.measure()
    _write(report, samples, asked)
    if report.load is not None and report.load.unsteady:
        raise MeasurementUnstable(f"the latency never settled: {report.load.steady.reason}; measure longer, or with less load")
    if report.limits:
        raise MeasurementUnstable(
            f"the load generator itself was the bottleneck: {report.limits[0]}; use a calmer machine, another one, or less load"
        )


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that one call sends, ready to be sent."""

    asked: Asked
    endpoint: Endpoint
    form: RequestForm
    bodies: list[bytes]
    warm_up_bodies: list[bytes]
    """Others, or a prefix cache would know the first of the run."""
    arrivals: OpenLoop | ClosedLoop | None
    """None for a sweep."""
    counter: TextCounter | None
    level: ServiceLevel | None

    @classmethod
    def prepare(cls, asked: Asked, endpoint: Endpoint, model: str) -> "Session":
        """Build schedule and bodies before anything is measured."""
        counter = tokenizer_counter(asked.tokenizer) if asked.tokenizer else None
        form = RequestForm(model, asked.chat, asked.stream, extra_fields(asked.extra))
        arrivals, shapes = traffic(asked)
        num, more = len(shapes), shapes[: asked.warm_up]
        bodies = build_bodies(form, shapes + more, prompt_text(asked.text), asked.seed, counter)
        return cls(asked, endpoint, form, bodies[:num], bodies[num:], arrivals, counter, service_level(asked.level))

    def measure(self) -> tuple[BenchReport, LoadSamples | None]:
        """Warm up, run, and return what was found with the raw samples of a single run."""
        asked, started = self.asked, datetime.now(UTC).isoformat(timespec="seconds")
        warm = self._load(self.warm_up_bodies, ClosedLoop(1, num_requests=asked.warm_up), None)
        if not warm.samples.ok.any():
            reason = warm.reasons.most_common(1)[0][0] if warm.reasons else "no answer"
            raise ConfigError(f"{self.endpoint.address} answers no request: {reason}. {warm.first_fault}".strip())
        counted_by = "the tokenizer" if self.counter else "the server's usage record" if warm.samples.num_tokens.max() > 0 else ""
        load, sweep, samples = None, None, None
        if self.arrivals is None:
            sweep = self._sweep()
        else:
            with LiveProgress(words(asked)) as progress:
                run = self._load(self.bodies, self.arrivals, progress)
            load, samples = summarize(run, counted_by=counted_by, level=self.level), run.samples
        report = BenchReport(
            target=self.endpoint.address,
            model=self.form.model,
            endpoint="chat" if asked.chat else "completions",
            stream=asked.stream,
            arrivals=words(asked),
            lengths=f"prompts {asked.prompt_tokens}, answers {asked.output_tokens} tokens"
            if asked.pacing.trace is None
            else "the trace's",
            seed=asked.seed,
            started_at=started,
            version=package_version(),
            machine=f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores",
            load=load,
            sweep=sweep,
            notes=self._notes(warm, counted_by, load),
        )
        return report, samples

    def _load(self, bodies: list[bytes], arrivals: OpenLoop | ClosedLoop, observer: Observer | None) -> LoadRun:
        plan = LoadPlan(
            bodies=bodies,
            arrivals=arrivals,
            stream=self.asked.stream,
            timeout_s=self.asked.timeout_s,
            counter=self.counter,
            max_connections=self.asked.max_connections,
        )
        return run_load(self.endpoint, plan, observer)

    def _sweep(self) -> Sweep:
        pacing, seed = self.asked.pacing, self.asked.seed

        def rising(rate_per_s: float, duration_s: float) -> OpenLoop:
            return OpenLoop(offsets(replace(pacing, rate=rate_per_s, duration_s=duration_s), seed))

        waiting = deque(self.bodies)

        def load(arrivals: OpenLoop | ClosedLoop, observer: Observer | None) -> LoadRun:
            run = self._load(list(waiting), arrivals, observer)
            waiting.rotate(-run.samples.num_requests)  # the next step goes on where this one ended
            return run

        with LiveProgress("sweep") as progress:

            def told(rate_per_s: float) -> Observer:
                progress.rename(f"{rate_per_s:.4g} requests/s")
                return progress

            return run_sweep(load, rising, SweepPlan(step_s=pacing.step_s, first_per_s=pacing.rate), told)

    def _notes(self, warm: LoadRun, counted_by: str, load: LoadResult | None) -> tuple[str, ...]:
        asked = self.asked
        notes = [f"{warm.samples.num_requests} requests before the run are not counted."]
        if not counted_by:
            notes.append("Tokens were not counted: the server sends no usage record; give --tokenizer.")
        if not asked.stream:
            notes.append("Without streaming there is no time to the first token and none between tokens.")
        if self.counter is None:
            notes.append("Prompt lengths are taken at 4 characters a token; --tokenizer makes them exact.")
        if load is not None:
            notes += _settling(load)
            if counted_by and asked.stream and load.num_events and load.figure("itl") is None:
                notes.append(
                    "Tokens came several to a chunk and which had how many is not known; --tokenizer gives times between them."
                )
            if any("without text" in reason for reason in load.failures):
                notes.append(
                    "Answers without text have failed; where the model ends at once, --body '{\"ignore_eos\": true}' may help."
                )
        if asked.pacing.concurrency is not None:
            notes.append(
                "A closed loop sends less while the server is slow: its tail is not what users at a given rate would see."
            )
        if load is None or load.num_requests > len(self.bodies):
            notes.append(f"{len(self.bodies)} different prompts were repeated; a prefix cache may know them.")
        if self.endpoint.host in ("127.0.0.1", "localhost", "::1"):
            notes.append("Server and generator share this machine's cores.")
        return tuple(notes)


def _settling(load: LoadResult) -> list[str]:
    """Say what of the run is in the figures."""
    steady = load.steady
    if not steady.steady:
        return [f"The run was not found steady: {steady.reason}."]
    if not steady.num_discarded:
        return []
    return [
        f"Warm-up: the first {steady.num_discarded} requests, {steady.discarded_s:.3g} s, are in no latency figure "
        "(they are in the counts and in the picture over time)."
    ]


def _write(report: BenchReport, samples: LoadSamples | None, asked: Asked) -> None:
    outputs = asked.outputs
    if outputs.csv is not None:
        write_csv(report, outputs.csv)
    if outputs.html is not None:
        write_atomically(outputs.html, bench_page(report).encode())
    if outputs.samples is not None and samples is not None:
        samples.save(outputs.samples)
    if outputs.as_json:
        typer.echo(report.model_dump_json(indent=1))
    else:
        print_report(report)
