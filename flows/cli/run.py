"""`model-optimizer run`: check everything, then start the flow."""

from pathlib import Path

import typer

from flows.bootstrap import prepare_environment, run_file
from flows.prepare import read_request
from flows.progress import terminal


def run_profile(profile: Path, overrides: tuple[str, ...], *, as_json: bool) -> None:
    """Run the flow in this process; the outcome is printed whatever the verdict.

    Raises:
        ConfigError: found before anything is started or written.
        GateFailed: a gate did not accept.
    """
    console = terminal()
    with console.status("reading the profile"):
        request = read_request(profile, overrides)
    console.print(f"[bold]{request.profile.name}[/bold]: {request.profile.model.ref}", highlight=False)
    prepare_environment(quiet=True)
    console.print("         starting Prefect (a temporary server takes up to a minute) and MLflow", style="dim")
    from flows.optimize import optimize

    state = optimize(str(profile), list(overrides), return_state=True)
    outcome = run_file(str(state.state_details.flow_run_id))
    if as_json and outcome.exists():
        typer.echo(outcome.read_text(encoding="utf-8"))
    state.result()
