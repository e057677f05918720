"""The options of the commands around a deployment root; they import what they need when they run."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")]
Bundle = Annotated[str, typer.Argument(help="a bundle's directory or name", show_default=False)]
Root = Annotated[Path, typer.Option("--to", help="the deployment root, a folder", show_default=False)]
By = Annotated[str, typer.Option("--by", help="who does it, for the history; left out: you")]
Why = Annotated[str, typer.Option("--why", help="a word for the history")]
PublicKey = Annotated[Path | None, typer.Option("--public-key", "--public_key", help="trusted key in PEM form")]


def add_release_commands(app: typer.Typer) -> None:
    """Add deploy, rollback, status, floor, allow-rollback and export."""
    for command in (deploy, rollback, status, floor, export):
        app.command()(command)
    app.command("allow-rollback")(allow_rollback)


def deploy(
    bundle: Bundle,
    to: Root,
    why: Why = "",
    by: By = "",
    override: Annotated[
        str | None, typer.Option("--override", help="deploy what is not signed off, for this reason; it is kept in the history")
    ] = None,
    public_key: PublicKey = None,
    as_json: Json = False,
) -> None:
    """Verify a signed-off bundle, check that it works here, and make it current in one rename; back by itself if it fails."""
    from flows.cli.deploy import deploy_bundle, reason

    deploy_bundle(bundle, to, reason(by, why, override), public_key, as_json=as_json)


def rollback(
    to: Root,
    version: Annotated[str | None, typer.Argument(help="a release, e.g. v2; left out: the one before the current")] = None,
    why: Why = "",
    by: By = "",
    public_key: PublicKey = None,
    as_json: Json = False,
) -> None:
    """Make an earlier release current again, at once."""
    from flows.cli.deploy import reason, roll_back

    roll_back(to, version, reason(by, why), public_key, as_json=as_json)


def status(to: Root, as_json: Json = False) -> None:
    """Show what a deployment root holds and how it came to that."""
    from flows.cli.deploy import print_status

    print_status(to, as_json=as_json)


def floor(
    bundle: Annotated[str, typer.Argument(help="the lowest that is still allowed, e.g. chat-v3", show_default=False)],
    to: Root,
    why: Annotated[str, typer.Option("--why", help="the fault in what is older", show_default=False)],
    by: By = "",
    as_json: Json = False,
) -> None:
    """Let nothing older become current in a root any more, not even by rollback; a floor only rises."""
    from flows.cli.deploy import raise_floor_of, reason

    raise_floor_of(bundle, to, reason(by, why), as_json=as_json)


def allow_rollback(
    bundle: Bundle,
    to: Root,
    why: Annotated[str, typer.Option("--reason", help="why the older bundle may come back", show_default=False)],
    key: Annotated[Path | None, typer.Option("--key", help="the signer's private key; left out: your own")] = None,
    expires_in: Annotated[str, typer.Option("--expires-in", "--expires_in", help="e.g. 90min, 24h, 7d")] = "24h",
    by: By = "",
    as_json: Json = False,
) -> None:
    """Sign an exception: this very bundle may become current in this root although it is older than the rule allows."""
    from flows.cli.deploy import Exemption, allow_older, reason

    allow_older(Exemption(bundle, to, key, expires_in), reason(by, why), as_json=as_json)


def export(
    bundle: Bundle,
    to: Annotated[Path, typer.Option("--to", help="a new folder", show_default=False)],
    form: Annotated[str, typer.Option("--form", help="triton or kubernetes", show_default=False)],
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="what the form asks for")] = None,
    public_key: PublicKey = None,
    as_json: Json = False,
) -> None:
    """Write a verified bundle in the form of another server or cluster."""
    from flows.cli.export import export_bundle

    export_bundle(bundle, to, form, tuple(settings or ()), public_key, as_json=as_json)
