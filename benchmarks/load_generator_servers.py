"""`model-optimizer bench` against real servers, by the command that users have."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.evidence import Figure
from model_optimizer.measurement.bench_report import LoadResult

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32


def measure_servers(
    reference: str, peers: Path, given: Mapping[str, str], *, streams: Sequence[int], num_requests: int
) -> list[Figure]:
    """Return speed and latency of every server at each number of streams; those given by URL, or else those started here."""
    figures = list[Figure]()
    if given:
        for case, url in given.items():
            figures += _cases(case, url, (), streams, num_requests)
        return figures
    from benchmarks.equal_bits import resolved  # these need libraries that a host which only runs the client may lack
    from benchmarks.server_streams import known_servers, running

    model = resolved(reference).absolute()
    with tempfile.TemporaryDirectory() as logs:
        for case, server in known_servers(model, peers).items():
            if isinstance(server, str):
                figures.append(Figure(case, "tok_per_s", None, "tok/s", reason=server[:200]))
                continue
            with contextlib.ExitStack() as stack:
                try:
                    url = stack.enter_context(running(server, Path(logs)))
                except RuntimeError as error:
                    figures.append(Figure(case, "tok_per_s", None, "tok/s", reason=str(error)[:200]))
                    continue
                figures += _cases(case, url, ("--model", server.model, "--tokenizer", str(model)), streams, num_requests)
    return figures


def _cases(case: str, url: str, options: tuple[str, ...], streams: Sequence[int], num_requests: int) -> list[Figure]:
    figures = list[Figure]()
    for width in streams:
        command = [sys.executable, "-m", "flows.cli", "bench", url, "--json", *options, "--concurrency", str(width)]
        command += ["--requests", str(num_requests), "--timeout", "600"]
        command += ["--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        name = f"{case}-{width}streams"
        if not done.stdout:
            figures.append(Figure(name, "bench_tok_per_s", None, "tok/s", reason=done.stderr.strip()[-200:]))
            continue
        figures += _figures(name, json.loads(done.stdout)["load"])
    return figures


def _figures(name: str, load: Mapping[str, object]) -> list[Figure]:
    """Return what a report says of one run."""
    result = LoadResult.model_validate(load)
    num = result.num_requests
    figures = [
        Figure(name, "bench_tok_per_s", result.output_tok_per_s, "tok/s", n=num),
        Figure(name, "bench_failed_count", float(result.num_failed), "count", n=num),
        Figure(
            name, "bench_generator_limited", float(result.health.limited), "count", n=num, reason="; ".join(result.health.limits)
        ),
    ]
    for kind in ("ttft", "tpot", "end_to_end"):
        figure = result.figure(kind)
        if figure is not None:
            median = figure.percentiles[0]
            figures.append(
                Figure(name, f"bench_{kind}_p50_ms", median.value, "ms", median.lower, median.upper, figure.num_samples)
            )
    return figures
