"""`model-optimizer deploy`, `rollback` and `status`."""

import getpass
import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

import typer

from flows.bootstrap import home
from model_optimizer.errors import ConfigError
from model_optimizer.release.deployment_root import Reason, Switched


def reason(by: str, why: str, override: str | None = None) -> Reason:
    """Return who moves `current` and why; who is the caller where `--by` is left out."""
    return Reason(by or _caller(), why, override)


def deploy_bundle(bundle: str, root: Path, why: Reason, public_key: Path | None, *, as_json: bool) -> None:
    """Deploy a bundle and say what was checked and how long the switch took.

    Raises:
        IntegrityError: the bundle does not verify.
        ConfigError: it is not signed off, or the root is something else.
        UnsupportedError, HealthCheckFailed: it does not work here.
    """
    from model_optimizer.release.deploy import deploy

    done = deploy(_find(bundle), root, why, public_key=public_key)
    if as_json:
        document = {"bundle": done.bundle, "num_bytes": done.num_bytes, "health": asdict(done.health)}
        typer.echo(json.dumps(document | _switched(done.switched), indent=1))
        return
    samples = f"{done.health.num_samples} samples equal"
    typer.echo(f"{done.bundle} is current in {root} ({_words(done.switched)}); {done.health.device}, {samples}")


def roll_back(root: Path, version: str | None, why: Reason, *, as_json: bool) -> None:
    """Go back to the release before the current one, or to the named one.

    Raises:
        ConfigError: no deployment root, an unknown version, or nothing to go back to.
        IntegrityError: the release to go back to is incomplete.
    """
    from model_optimizer.release.deploy import rollback, status

    switched = rollback(root, why, version)
    current = switched.move.to_bundle if switched.move else status(root).current
    if as_json:
        typer.echo(json.dumps({"bundle": current} | _switched(switched), indent=1))
        return
    typer.echo(f"{current} is current in {root} ({_words(switched)})")


def print_status(root: Path, *, as_json: bool) -> None:
    """Print what a root holds.

    Raises:
        ConfigError: no deployment root.
        IntegrityError: the current release is incomplete, or the root was tampered with.
    """
    from model_optimizer.errors import IntegrityError
    from model_optimizer.release.deploy import status

    seen = status(root)
    if as_json:
        typer.echo(seen.model_dump_json(indent=1))
    else:
        typer.echo(f"current   {seen.current or 'nothing deployed'}\nprevious  {seen.previous or 'none'}")
        for row in seen.releases:
            typer.echo(f"{row.state:9} {row.bundle}  {row.decision}, level {row.level}, manifest {row.manifest_sha256[:12]}")
        for move in seen.moves:
            words = ": ".join(text for text in (move.why, move.override and f"override: {move.override}") if text)
            typer.echo(f"{move.at[:19]}Z  {move.what}  {move.from_bundle} -> {move.to_bundle}  {move.who}  {words}".rstrip())
    if seen.fault is not None:
        raise IntegrityError(f"{seen.current} is current and incomplete: {seen.fault}; roll back, then deploy it again")


def _find(bundle: str) -> Path:
    """Return a bundle by directory, or by name in this folder's bundles."""
    for folder in (Path(bundle), home() / "bundles" / bundle):
        if folder.is_dir():
            return folder
    raise ConfigError(f"no bundle {bundle!r} here or in {home() / 'bundles'}; `model-optimizer run PROFILE` makes one")


def _caller() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in many containers
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _switched(switched: Switched) -> dict[str, object]:
    return {"move": switched.move.model_dump(mode="json") if switched.move else None, "switch_ms": switched.elapsed_ms}


def _words(switched: Switched) -> str:
    if switched.move is None:
        return "it was already"
    return f"before: {switched.move.from_bundle or 'nothing'}; switched in {switched.elapsed_ms:.0f} ms"
