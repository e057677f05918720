"""`model-optimizer deploy`, `rollback`, `status`, `floor` and `allow-rollback`."""

import getpass
import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flows.bootstrap import home
from model_optimizer.errors import ConfigError
from model_optimizer.release.deployment_root import RELEASES, Reason, Switched

if TYPE_CHECKING:
    from model_optimizer.release.deploy import Bound


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

    done = deploy(find_bundle(bundle), root, why, public_key=public_key)
    _tell_mlflow(root, done.bundle, why)
    if as_json:
        document = {"bundle": done.bundle, "num_bytes": done.num_bytes, "health": asdict(done.health)}
        typer.echo(json.dumps(document | _switched(done.switched), indent=1))
        return
    samples = f"{done.health.num_samples} samples equal"
    typer.echo(f"{done.bundle} is current in {root} ({_words(done.switched)}); {done.health.device}, {samples}")


def roll_back(root: Path, version: str | None, why: Reason, public_key: Path | None, *, as_json: bool) -> None:
    """Go back to the release before the current one, or to the named one.

    Raises:
        ConfigError: no deployment root, an unknown version, nothing to go back to, or a release below the floor.
        IntegrityError: the release to go back to is incomplete.
    """
    from model_optimizer.release.deploy import rollback, status

    switched = rollback(root, why, version, public_key=public_key)
    current = switched.move.to_bundle if switched.move else status(root).current
    _tell_mlflow(root, current, why)
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
        for bound in seen.bounds:
            typer.echo(_bound(bound))
        for row in seen.releases:
            below = ", below the floor" if row.below_floor else ""
            typer.echo(
                f"{row.state:9} {row.bundle}  {row.decision}, level {row.level}, manifest {row.manifest_sha256[:12]}{below}"
            )
        for move in seen.moves:
            words = ": ".join(text for text in (move.why, move.override and f"override: {move.override}") if text)
            typer.echo(f"{move.at[:19]}Z  {move.what}  {move.from_bundle} -> {move.to_bundle}  {move.who}  {words}".rstrip())
    if seen.fault is not None:
        raise IntegrityError(f"{seen.current} is current and incomplete: {seen.fault}; roll back, then deploy it again")


@dataclass(frozen=True, slots=True)
class Exemption:
    """What `allow-rollback` was asked for."""

    bundle: str
    root: Path
    key: Path | None
    expires_in: str


def raise_floor_of(bundle: str, root: Path, why: Reason, *, as_json: bool) -> None:
    """Raise the floor of a bundle's family.

    Raises:
        ConfigError: no deployment root, no name of a bundle, no reason, or a floor that would fall.
    """
    from model_optimizer.release.downgrade import raise_floor, split_name

    floor = raise_floor(root, bundle, why)
    family, _ = split_name(bundle)
    if as_json:
        typer.echo(json.dumps({"family": family} | floor.model_dump(), indent=1))
        return
    typer.echo(f"nothing older than {family}-v{floor.version} becomes current in {root} any more: {floor.why}")


def allow_older(asked: Exemption, why: Reason, *, as_json: bool) -> None:
    """Sign an exception for a bundle that verifies under the key's other half, and lay it into the root.

    Raises:
        ConfigError: no deployment root, no such bundle, no reason, no key, or no time that can be read.
        IntegrityError: the bundle does not verify.
    """
    from flows.cli.store import seconds
    from model_optimizer.release.config import SignerConfig
    from model_optimizer.release.downgrade import write_permit
    from model_optimizer.release.sign import ensure_key
    from model_optimizer.release.verify import verify_bundle

    expires_at = datetime.now(UTC) + timedelta(seconds=seconds(asked.expires_in, "--expires-in"))
    held = asked.root / RELEASES / asked.bundle
    release = held if held.is_dir() else find_bundle(asked.bundle)
    private = (asked.key or SignerConfig().key).expanduser()
    if not private.is_file():
        raise ConfigError(f"there is no signing key {private}; give the signer's with --key")
    key = ensure_key(private)
    verify_bundle(release, public_key=key.public)
    permit = write_permit(asked.root, release.resolve(), why, key, expires_at)
    if as_json:
        typer.echo(permit.model_dump_json(indent=1))
        return
    typer.echo(f"{permit.bundle} may become current in {asked.root} until {permit.expires_at}: {permit.reason}")


def find_bundle(bundle: str) -> Path:
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


def _tell_mlflow(root: Path, bundle: str | None, why: Reason) -> None:
    """Move the alias `production` where a tracking server is named; it takes two seconds at most and never fails."""
    if bundle is None or not os.environ.get("MLFLOW_TRACKING_URI"):
        return
    from model_optimizer.release.deploy import status
    from tasks.mirror import mirror_deployment

    for row in status(root).releases:
        if row.bundle == bundle:
            mirror_deployment(home(), bundle, row.manifest_sha256, why.who)


def _bound(bound: "Bound") -> str:
    highest = f"{bound.family}-v{bound.newest}" if bound.newest is not None else "none"
    floor = "" if bound.floor is None else f"; floor {bound.family}-v{bound.floor}: {bound.because}"
    return f"newest    {highest}{floor}"


def _switched(switched: Switched) -> dict[str, object]:
    return {"move": switched.move.model_dump(mode="json") if switched.move else None, "switch_ms": switched.elapsed_ms}


def _words(switched: Switched) -> str:
    if switched.move is None:
        return "it was already"
    return f"before: {switched.move.from_bundle or 'nothing'}; switched in {switched.elapsed_ms:.0f} ms"
