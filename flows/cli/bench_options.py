"""What `model-optimizer bench` takes; the work is done in `flows.cli.bench`, which is imported when it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the result goes beside the terminal."""

    as_json: bool
    csv: Path | None
    html: Path | None
    samples: Path | None


@dataclass(frozen=True, slots=True)
class Pacing:
    """When requests are sent."""

    rate: float | None
    arrival: Literal["poisson", "steady", "burst"]
    burst: str
    trace: Path | None
    speed: float
    concurrency: int | None
    sweep: bool
    step_s: float
    duration_s: float | None
    requests: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of `bench`."""

    target: str
    model: str | None
    chat: bool
    stream: bool
    pacing: Pacing
    prompt_tokens: str
    output_tokens: str
    text: Path | None
    tokenizer: Path | None
    level: tuple[str, ...]
    extra: str
    key_variable: str | None
    timeout_s: float
    warm_up: int
    max_connections: int | None
    seed: int
    config: Path | None
    outputs: Outputs


PromptTokens = Annotated[str, typer.Option("--prompt-tokens", "--prompt_tokens", metavar="N|P50,P95,MAX", help="lengths")]
Tokenizer = Annotated[
    Path | None, typer.Option("--tokenizer", help="directory; counts tokens instead of the server's usage record")
]
Level = Annotated[
    list[str] | None, typer.Option("--sla", metavar="KEY=MS", help="ttft_ms, tpot_ms or end_to_end_ms, for goodput")
]
KeyVariable = Annotated[
    str | None, typer.Option("--api-key-variable", "--api_key_variable", help="environment variable with the key")
]


def bench(
    target: Annotated[str, typer.Argument(metavar="URL|BUNDLE", help="an OpenAI-compatible server, or what `serve` takes")],
    model: Annotated[str | None, typer.Option("--model", help="left out: the first that the server names")] = None,
    chat: Annotated[bool, typer.Option("--chat/--completions", help="which endpoint")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream")] = True,
    rate: Annotated[float | None, typer.Option("--rate", help="open loop: requests per second")] = None,
    arrival: Annotated[Literal["poisson", "steady", "burst"], typer.Option("--arrival", help="how they are spread")] = "poisson",
    burst: Annotated[str, typer.Option("--burst", metavar="RATE,PERIOD,LENGTH", help="e.g. 50,10,2: 50/s for 2 of 10 s")] = "",
    trace: Annotated[Path | None, typer.Option("--trace", help="open loop: JSONL with time, prompt and output tokens")] = None,
    speed: Annotated[float, typer.Option("--speed", help="of the trace; 2: twice as fast")] = 1.0,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="closed loop: requests in flight")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="open loop at rising rates until the server is over capacity")] = False,
    step_s: Annotated[float, typer.Option("--step", help="seconds of each rate of a sweep")] = 10.0,
    duration_s: Annotated[float | None, typer.Option("--duration", help="seconds; left out: 30, or what --requests take")] = None,
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="how many")] = None,
    prompt_tokens: PromptTokens = "64,256,512",
    output_tokens: Annotated[str, typer.Option("--output-tokens", "--output_tokens", metavar="N|P50,P95,MAX")] = "32,128,256",
    text: Annotated[Path | None, typer.Option("--text", help="what prompts are cut from; left out: text that ships")] = None,
    tokenizer: Tokenizer = None,
    level: Level = None,
    extra: Annotated[str, typer.Option("--body", metavar="JSON", help="further fields, e.g. '{\"ignore_eos\": true}'")] = "{}",
    key_variable: KeyVariable = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds from when a request was due")] = 120.0,
    warm_up: Annotated[int, typer.Option("--warm-up", "--warm_up", min=1, help="requests before, not counted")] = 4,
    max_connections: Annotated[int | None, typer.Option("--max-connections", "--max_connections", min=1)] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    config: Annotated[Path | None, typer.Option("--config", help="serve.yaml, for a bundle")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")] = False,
    csv: Annotated[Path | None, typer.Option("--csv", help="write the figures")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="write a page")] = None,
    samples: Annotated[Path | None, typer.Option("--samples", help="write every time of every request (parquet)")] = None,
) -> None:
    """Load a server and show percentiles with intervals; exit 5 where they never settle or the generator was the bottleneck."""
    from flows.cli.bench import run_bench

    pacing = Pacing(rate, arrival, burst, trace, speed, concurrency, sweep, step_s, duration_s, requests)
    outputs = Outputs(as_json, csv, html, samples)
    asked = Asked(
        target=target, model=model, chat=chat, stream=stream, pacing=pacing, prompt_tokens=prompt_tokens,
        output_tokens=output_tokens, text=text, tokenizer=tokenizer, level=tuple(level or ()), extra=extra,
        key_variable=key_variable, timeout_s=timeout_s, warm_up=warm_up, max_connections=max_connections, seed=seed,
        config=config, outputs=outputs,
    )  # fmt: skip
    run_bench(asked)
