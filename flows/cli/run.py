"""`model-optimizer run`: check everything, then start the flow."""

import json
from dataclasses import dataclass
from pathlib import Path

import typer

from flows.bootstrap import home, prepare_environment, run_file
from flows.cli.github import GithubFiles
from flows.prepare import Request, read_request
from flows.progress import terminal
from flows.surroundings import check_surroundings
from model_optimizer.artifacts.base import Stage
from model_optimizer.errors import AwaitingSignOff, ConfigError


@dataclass(frozen=True)
class Span:
    """Which stages the user wants: made again from `first` on, ended after `last`."""

    first: Stage | None
    last: Stage | None

    @classmethod
    def of(cls, first: Stage | None, last: Stage | None, only: Stage | None) -> "Span":
        """Read `--from`, `--until` and `--only`.

        Raises:
            ConfigError: they contradict each other.
        """
        if only and (first or last):
            raise ConfigError(f"--only {only} already says where to begin and to end; leave out --from and --until")
        span = cls(only or first, only or last)
        order = list(Stage)
        if span.first and span.last and order.index(span.last) < order.index(span.first):
            raise ConfigError(f"--until {span.last} comes before --from {span.first}; the order is {', '.join(order)}")
        return span


def run_profile(profile: Path, overrides: tuple[str, ...], span: Span, *, as_json: bool, github: Path | None = None) -> None:
    """Run the flow in this process; the outcome is printed whatever the verdict, and left for a workflow in `github`.

    Raises:
        ConfigError: found before anything is started or written.
        GateFailed: a gate did not accept.
        AwaitingSignOff: all did, and a person must sign the bundle off.
    """
    with GithubFiles(github, profile, "run") as files:
        _run(profile, overrides, span, files, as_json=as_json)


def _run(profile: Path, overrides: tuple[str, ...], span: Span, files: GithubFiles, *, as_json: bool) -> None:
    console = terminal()
    with console.status("reading the profile"):
        request = read_request(profile, overrides)
        if span.first:
            _require_held(request, span.first)
        check_surroundings(request)
    console.print(f"[bold]{request.profile.name}[/bold]: {request.profile.model.ref}", highlight=False)
    console.print("         starting Prefect (a local server takes up to a minute) and MLflow", style="dim")
    server = prepare_environment(quiet=True)
    from flows.optimize import optimize  # takes seconds, while the server starts
    from tasks.tracking import load_in_background

    if server:
        loading = load_in_background()
        server.wait()
        loading.join()
    state = optimize(str(profile), overrides, [span.first] if span.first else [], span.last, return_state=True)
    outcome = run_file(str(state.state_details.flow_run_id))
    if outcome.exists():
        files.read_outcome(outcome)
    if as_json and outcome.exists():
        typer.echo(outcome.read_text(encoding="utf-8"))
    state.result()
    require_answer(outcome)
    if span.last:
        console.print(f"ended after {span.last}, as asked; a run without --until goes on from here", style="dim")


def require_answer(outcome: Path) -> None:
    """Refuse to call a run done whose bundle still waits for a reviewer."""
    signoff = json.loads(outcome.read_bytes()).get("signoff") or {}
    if signoff.get("waits"):
        raise AwaitingSignOff(signoff["waits"])


def _require_held(request: Request, first: Stage) -> None:
    """Refuse to begin at a stage whose predecessors the store does not hold."""
    from flows.walk import held_stages

    order = list(Stage)
    held = {step.stage for step in held_stages(request, home() / "store") if step.stored is not None}
    missing = [stage for stage in order[: order.index(first)] if stage not in held]
    if missing:
        raise ConfigError(
            f"--from {first} needs the stages before it in the store, which lacks {', '.join(missing)}; run without --from first"
        )
