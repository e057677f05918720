"""Commands around Prefect deployments; what they need is imported when they run."""

import typer

deployment_commands = typer.Typer(help="The flows as Prefect deployments.", no_args_is_help=True)


@deployment_commands.callback()
def _root() -> None:
    pass


@deployment_commands.command("serve")
def deployments_serve() -> None:
    """Serve `manual` and `nightly-soak` from this checkout to the server that PREFECT_API_URL names, until interrupted."""
    from flows.cli.deployments import serve_deployments

    serve_deployments()
