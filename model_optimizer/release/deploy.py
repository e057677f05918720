"""Deploy a bundle to a root, go back, and say what is deployed.

A release enters the root only as a verified copy, and `current` moves only to what passed its health
check; where the check through `current` then fails, the link goes back by itself.
"""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_optimizer.artifacts.base import Frozen, file_sha256
from model_optimizer.artifacts.release import SignOff
from model_optimizer.errors import ConfigError, HealthCheckFailed, IntegrityError
from model_optimizer.release.config import SignerConfig
from model_optimizer.release.deployment_root import CURRENT, DeploymentRoot, Move, Reason, Switched, check_complete
from model_optimizer.release.downgrade import Floor, Guard, newest, read_floors, split_name
from model_optimizer.release.health import Health, check_health
from model_optimizer.release.manifest import MANIFEST, verify_manifest
from model_optimizer.release.sign import public_key_path
from model_optimizer.release.signoff import record_path, record_signature_path, replace_record
from model_optimizer.release.terms import waiting_line
from model_optimizer.release.verify import BundleFacts, verify_bundle

log = logging.getLogger(__name__)

NUM_SHOWN_MOVES = 10
_SHOWN_DIGITS = 16
_DEPLOYABLE = ("signed-off", "baseline")
Check = Callable[[Path], Health]
Transfer = Callable[[Path, Path], None]


@dataclass(frozen=True, slots=True)
class Checks:
    """What must hold before `current` moves (given the release) and after (given the link)."""

    before: Check = check_health
    after: Check = check_health


@dataclass(frozen=True, slots=True)
class Deployed:
    """What `deploy` did; `switched.move` is None where the bundle was current already."""

    bundle: str
    num_bytes: int
    switched: Switched
    health: Health


class ReleaseRow(Frozen):
    """One release of a root, as its sign-off record describes it."""

    bundle: str
    decision: str
    level: str
    manifest_sha256: str
    state: Literal["current", "previous", "held"]
    below_floor: bool = False


class Bound(Frozen):
    """How far back a family of bundles may go in a root."""

    family: str
    newest: int | None
    """The highest version that was current; `deploy` brings in nothing older."""
    floor: int | None
    """Not even `rollback` goes below it."""
    because: str | None
    """Why the floor was raised, and by whom."""


class Status(Frozen):
    """What a deployment root holds."""

    current: str | None
    previous: str | None
    """Where `rollback` goes."""
    fault: str | None
    """What is missing from the current release at a quick look, or None."""
    releases: tuple[ReleaseRow, ...]
    moves: tuple[Move, ...]
    """The last ones, oldest first."""
    bounds: tuple[Bound, ...] = ()
    """What older versions may not come back, for each family."""


def copy_file(source: Path, destination: Path) -> None:
    """Copy one file's content inside the kernel, which shares blocks where the file system can."""
    with source.open("rb") as reader, destination.open("xb") as writer:
        remaining = os.fstat(reader.fileno()).st_size
        try:
            while remaining > 0 and (copied := os.copy_file_range(reader.fileno(), writer.fileno(), remaining)):
                remaining -= copied
        except OSError:  # not between these two file systems
            reader.seek(0)
            writer.truncate(0)
            writer.seek(0)
            shutil.copyfileobj(reader, writer, 1 << 20)
    destination.chmod(source.stat().st_mode & 0o755)


def deploy(
    bundle: Path,
    root: Path,
    reason: Reason,
    *,
    public_key: Path | None,
    checks: Checks | None = None,
    transfer: Transfer = copy_file,
) -> Deployed:
    """Verify a bundle, bring it into the root and make it current; a no-op where it is current and intact.

    Raises:
        IntegrityError: the bundle, or what the root holds under its name, does not verify.
        ConfigError: it is not signed off and `reason.override` is not given; it is older than what was current here, or
            below the floor; the root is something else, or holds another bundle of this name.
        StorageError: the root is full or cannot be written.
        UnsupportedError, HealthCheckFailed: the check failed; `current` is what it was before.
    """
    checks = checks or Checks()
    facts = verify_bundle(bundle, public_key=public_key)
    _require_answer(facts, reason)
    place = DeploymentRoot.create(root)
    trusted = public_key or public_key_path(SignerConfig().key)
    guard = Guard(place, facts.name, facts.manifest_sha256, only_floor=False, public_key=trusted)
    with place.receiving() as incoming:
        if place.target() != facts.name:
            guard()  # asked again when the link moves; here it spares the copy
        bundle = bundle.resolve()
        if not _is_held(place, bundle, facts, incoming):
            staged = _stage(bundle, facts, incoming, transfer)
            checks.before(staged)
            place.admit(staged)
        else:
            checks.before(place.release(facts.name))
        switched = place.switch(facts.name, "deploy", reason, guard=guard)
        health = _check_or_go_back(place, switched, checks.after, reason)
    return Deployed(facts.name, facts.num_bytes, switched, health)


def rollback(root: Path, reason: Reason, version: str | None = None, *, public_key: Path | None = None) -> Switched:
    """Point `current` to the release before it, or to the named one; a no-op where it is current already.

    `version` is a release's name, `v3` or `3`. The bundle that it was deployed from is not needed, and `public_key` (None: the
    default signer's) only where the release is below the floor and a permit lets it pass.

    Raises:
        ConfigError: no deployment root, an unknown version, nothing to go back to, or a release below the floor.
        IntegrityError: the release to go back to lacks something; `current` stays.
    """
    place = DeploymentRoot.open(root)
    key = public_key or public_key_path(SignerConfig().key)
    if version is not None:
        return _go_back(place, _find(place, version), reason, key)
    here, earlier = place.current(), place.earlier()
    if not earlier:
        known = ", ".join(place.names()) or "none"
        raise ConfigError(f"{root}: nothing to roll back to from {here or 'an empty root'}; releases here: {known}")
    return _go_back(place, earlier[0], reason, key, only_from=here)


def _go_back(place: DeploymentRoot, to: str, reason: Reason, public_key: Path, only_from: str | None = None) -> Switched:
    manifest = place.release(to) / MANIFEST  # where it is missing, the move itself says so
    guard = Guard(place, to, file_sha256(manifest) if manifest.is_file() else "", only_floor=True, public_key=public_key)
    return place.switch(to, "rollback", reason, only_from=only_from, guard=guard)


def status(root: Path) -> Status:
    """Return what is deployed, what was before, and the last moves.

    Raises:
        ConfigError: no deployment root.
        IntegrityError: `current` or the history cannot be read.
    """
    place = DeploymentRoot.open(root)
    current, earlier = place.current(), place.earlier()
    fault = None
    if current is not None:
        try:
            check_complete(place.release(current))
        except IntegrityError as error:
            fault = str(error)
    previous, moves, floors = earlier[0] if earlier else None, place.history(), read_floors(place)
    return Status(
        current=current,
        previous=previous,
        fault=fault,
        releases=tuple(_row(place.release(name), current, previous, floors) for name in place.names()),
        moves=moves[-NUM_SHOWN_MOVES:],
        bounds=_bounds(newest(moves, current), floors),
    )


def _bounds(highest: Mapping[str, int], floors: Mapping[str, Floor]) -> tuple[Bound, ...]:
    rows = []
    for family in sorted(highest.keys() | floors.keys()):
        floor = floors.get(family)
        rows.append(
            Bound(
                family=family,
                newest=highest.get(family),
                floor=floor.version if floor else None,
                because=f"{floor.why} ({floor.who}, {floor.at[:10]})" if floor else None,
            )
        )
    return tuple(rows)


def _require_answer(facts: BundleFacts, reason: Reason) -> None:
    """Let only signed-off bundles and baselines pass, or whatever somebody answers for."""
    if reason.override is None:
        require_sign_off(facts, ", or give --override REASON")
    elif not reason.override.strip():
        raise ConfigError("an override needs its reason in words; it goes into the history")


def require_sign_off(facts: BundleFacts, otherwise: str = "") -> None:
    """Let only signed-off bundles and baselines pass; `otherwise` ends the advice, where there is another way."""
    assert facts.record is not None, "verify_bundle without allow_unsigned returns a record"
    decision = facts.record.decision
    if decision in _DEPLOYABLE:
        return
    if decision == "refused":
        failed = ", ".join(str(gate["name"]) for gate in facts.record.gates if gate["verdict"] != "ACCEPT") or "none named"
        fault = f"verdict {facts.record.verdict}; gates: {failed}"
        remedy = "take a signed-off version"
    else:
        fault = f"its record says {decision}"
        remedy = waiting_line(facts.record)
    raise ConfigError(f"{facts.name} is not signed off ({fault}); {remedy}{otherwise}")


def _is_held(place: DeploymentRoot, bundle: Path, facts: BundleFacts, incoming: Path) -> bool:
    """Return whether the root holds this very bundle, intact; a damaged one that is not current is taken out.

    The bundle's record replaces the one that was held: a bundle may have been approved, or refused, since.
    """
    held = place.release(facts.name)
    if not held.exists():
        return False
    if (was := _held_roots(held)) not in (None, _roots(facts.record)):
        raise ConfigError(
            f"{place.path} holds another {facts.name} (manifest and signature {was}, not {_roots(facts.record)}); "
            "names of releases are never used twice: release a new version"
        )
    try:
        verify_manifest(held)
        check_complete(held)
    except IntegrityError as error:
        log.warning("%s is replaced in %s: %s", facts.name, place.path, error)
        place.discard(facts.name, incoming)
        return False
    replace_record(held, record_path(bundle).read_bytes(), record_signature_path(bundle).read_bytes())
    return True


def _held_roots(held: Path) -> str | None:
    """Return the digests that the record of a held release vouches for, or None where it cannot be read."""
    try:
        return _roots(SignOff.model_validate_json(record_path(held).read_bytes()))
    except (OSError, ValueError):
        return None


def _roots(record: SignOff | None) -> str:
    assert record is not None, "verify_bundle without allow_unsigned returns a record"
    return f"{record.bundle_manifest_sha256[:_SHOWN_DIGITS]}/{record.signature_sha256[:_SHOWN_DIGITS]}"


def _stage(bundle: Path, facts: BundleFacts, incoming: Path, transfer: Transfer) -> Path:
    """Copy bundle and record into the incoming folder and check the copy against what was verified."""
    staged = incoming / bundle.name
    for directory, _, names in os.walk(bundle):
        folder = staged / Path(directory).relative_to(bundle)
        folder.mkdir()
        for name in names:
            transfer(Path(directory, name), folder / name)
    for place in (record_path, record_signature_path):
        transfer(place(bundle), place(staged))
    verify_manifest(staged)
    _require_same_record(record_path(staged).read_bytes(), facts)
    if check_complete(staged) != facts.manifest_sha256:
        raise IntegrityError(f"{bundle.name}: modified while it was copied; nothing was changed")
    return staged


def _require_same_record(content: bytes, facts: BundleFacts) -> None:
    """Refuse a record that is not the one whose signature was verified."""
    try:
        same = SignOff.model_validate_json(content) == facts.record
    except ValueError:
        same = False
    if not same:
        raise IntegrityError(f"{facts.name}: its sign-off record was modified while it was copied; nothing was changed")


def _check_or_go_back(place: DeploymentRoot, switched: Switched, check: Check, reason: Reason) -> Health:
    """Check the release through `current`; where it fails and this call made it current, undo that."""
    try:
        return check(place.path / CURRENT)
    except BaseException as error:
        if switched.move is None:
            raise
        to, failed = switched.move.from_bundle, switched.move.to_bundle
        why = f"health check after activation: {' '.join(str(error).split()) or type(error).__name__}"
        undone = place.switch(to, "automatic rollback", Reason(reason.who, why), only_from=failed).move
        now = f"current is {to} again" if to else "nothing is deployed, as before"
        log.warning("%s was taken back: %s", failed, now if undone else "somebody else moved current meanwhile")
        if isinstance(error, HealthCheckFailed):
            raise HealthCheckFailed(f"{failed}: {error}; {now}") from error
        raise


def _find(place: DeploymentRoot, version: str) -> str:
    """Return the one release that `version` names."""
    names = place.names()
    wanted = version if version in names else f"-v{version.removeprefix('v')}"
    found = [name for name in names if name == wanted or (wanted.startswith("-v") and name.endswith(wanted))]
    if len(found) == 1:
        return found[0]
    fault = f"{version!r} names {len(found)} releases" if found else f"no release {version!r}"
    raise ConfigError(f"{place.path}: {fault}; known: {', '.join(names) or 'none'}")


def _row(release: Path, current: str | None, previous: str | None, floors: Mapping[str, Floor]) -> ReleaseRow:
    try:
        record = SignOff.model_validate_json(record_path(release).read_bytes())
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{record_path(release).name}: missing or unreadable; deploy {release.name} again") from error
    family, version = split_name(release.name)
    return ReleaseRow(
        bundle=release.name,
        below_floor=family in floors and version < floors[family].version,
        decision=record.decision,
        level=record.level,
        manifest_sha256=record.bundle_manifest_sha256,
        state="current" if release.name == current else "previous" if release.name == previous else "held",
    )
