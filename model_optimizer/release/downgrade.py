"""Against going back unawares: which older releases may become current in a root, and the signed exceptions.

Two numbers bind a root, for each family of bundles (`chat` of `chat-v3`):

- *newest*: the highest version that was current and kept its place. It is read from the history. `deploy` brings in nothing
  older, except the release that `rollback` would go to.
- *floor*: what an operator raised after a fault in older releases; `floors.json`. It binds `rollback` too, and only rises.

A permit lets one bundle into one root in spite of both, until it expires: canonical JSON and its signature in `permits/`, under
the key that the root's bundles are signed with. Going back by itself after a failed health check asks nothing: it restores
what was there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import RootModel, ValidationError

from model_optimizer.artifacts.base import Frozen, file_sha256
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.release.deployment_root import DeploymentRoot, Move, Reason
from model_optimizer.release.manifest import MANIFEST
from model_optimizer.release.sign import SigningKey, sign_bytes, verify_bytes
from model_optimizer.store import canonical_json, write_atomically

FLOORS = "floors.json"
PERMITS = "permits"
PERMIT_FORMAT = 1
_NAME = re.compile(r"(?P<family>.+)-v(?P<version>\d+)")


class Floor(Frozen):
    """The lowest version of a family that may become current."""

    version: int
    at: str
    """UTC, ISO 8601."""
    who: str
    why: str


class Permit(Frozen):
    """One bundle, by digest, may become current in one root until `expires_at` although it is older than the rule allows."""

    permit_format: int
    root_id: str
    bundle: str
    manifest_sha256: str
    reason: str
    who: str
    issued_at: str
    expires_at: str
    """UTC, ISO 8601."""


class _Floors(RootModel[dict[str, Floor]]):
    """floors.json: family -> floor."""


@dataclass(frozen=True, slots=True)
class Guard:
    """The rule for one move of `current`; called while the right to move it is held."""

    place: DeploymentRoot
    to: str
    manifest_sha256: str
    only_floor: bool
    """For `rollback`: going back within the root is what it is for."""
    public_key: Path

    def __call__(self) -> str | None:
        """Return the digest of the permit that the move needs, or None where it needs none.

        Raises:
            ConfigError: the move is a downgrade without a permit; says which number forbids it.
            IntegrityError: a permit that does not hold, or a floor or history that cannot be read.
        """
        fault = self._fault()
        if fault is None:
            return None
        permit = read_permit(self.place, self.to, self.manifest_sha256, self.public_key)
        if permit is None:
            raise ConfigError(
                f"{fault}; deploy a newer version, or have the holder of the key sign an exception: "
                f"`model-optimizer allow-rollback {self.to} --to ROOT --key KEY --reason WHY`"
            )
        return permit

    def _fault(self) -> str | None:
        family, version = split_name(self.to)
        floor = read_floors(self.place).get(family)
        if floor is not None and version < floor.version:
            return f"{self.to} is below the floor {family}-v{floor.version} of {self.place.path} ({floor.why}; {floor.who})"
        if self.only_floor:
            return None
        try:
            current = self.place.current()
        except IntegrityError:  # a link that leads nowhere is mended by deploying
            current = None
        # the one before may be out of the root for a moment, while a damaged copy is replaced
        before = () if current is None else (*self.place.stack()[:1], *self.place.earlier()[:1])
        if self.to in (current, *before):
            return None
        highest = newest(self.place.history(), current).get(family, version)
        if version < highest:
            return (
                f"{self.to} is older than {family}-v{highest}, which was current in {self.place.path}, and not the release before"
            )
        return None


def split_name(bundle: str) -> tuple[str, int]:
    """Return family and version of a bundle's name.

    Raises:
        ConfigError: it does not end with -vN.
    """
    match = _NAME.fullmatch(bundle)
    if match is None:
        raise ConfigError(f"{bundle!r} is no name of a bundle; expected NAME-vN, e.g. chat-v3")
    return match["family"], int(match["version"])


def newest(moves: tuple[Move, ...], current: str | None) -> Mapping[str, int]:
    """Return the highest version of each family that is or was current, without those that the next move took back by itself."""
    undone = {at - 1 for at, move in enumerate(moves) if move.what == "automatic rollback"}
    highest: dict[str, int] = {}
    for name in (*(move.to_bundle for at, move in enumerate(moves) if at not in undone), current):
        if name is not None:
            family, version = split_name(name)
            highest[family] = max(version, highest.get(family, version))
    return highest


def read_floors(place: DeploymentRoot) -> Mapping[str, Floor]:
    """Return the floor of each family that has one.

    Raises:
        IntegrityError: the file cannot be read; nothing is assumed in its place.
    """
    path = place.path / FLOORS
    try:
        return _Floors.model_validate_json(path.read_bytes()).root
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise IntegrityError(f"{path}: it is no list of floors; restore it, nothing moves before that") from error


def raise_floor(root: Path, bundle: str, reason: Reason) -> Floor:
    """Let no version of the bundle's family below its own become current from now on; what is current stays.

    Raises:
        ConfigError: no deployment root, no name of a bundle, no reason, or a floor that would fall.
        IntegrityError: the floors cannot be read.
    """
    place = DeploymentRoot.open(root)
    family, version = split_name(bundle)
    if not reason.why.strip():
        raise ConfigError("a floor needs its reason in words (--why), e.g. the fault in what is below it")
    with place.moving():
        floors = dict(read_floors(place))
        if family in floors and version < floors[family].version:
            raise ConfigError(
                f"the floor of {family} in {root} is v{floors[family].version} ({floors[family].why}) and never falls to "
                f"v{version}; for one older bundle there is `model-optimizer allow-rollback`"
            )
        floors[family] = Floor(version=version, at=_now().isoformat(timespec="seconds"), who=reason.who, why=reason.why.strip())
        write_atomically(place.path / FLOORS, canonical_json({name: floor.model_dump() for name, floor in floors.items()}))
    return floors[family]


def permit_path(place: DeploymentRoot, bundle: str) -> Path:
    return place.path / PERMITS / f"{bundle}.json"


def write_permit(root: Path, release: Path, reason: Reason, key: SigningKey, expires_at: datetime) -> Permit:
    """Sign an exception for one verified release (in the root or elsewhere) and lay it into the root.

    Raises:
        ConfigError: no deployment root, no reason, or a time that is over.
    """
    place = DeploymentRoot.open(root)
    split_name(release.name)
    if not reason.why.strip():
        raise ConfigError("an exception needs its reason in words (--reason); it is signed with it")
    if expires_at <= _now():
        raise ConfigError(f"the exception would be over since {expires_at:%Y-%m-%d %H:%M} UTC; give a time to come")
    permit = Permit(
        permit_format=PERMIT_FORMAT,
        root_id=place.identify(),
        bundle=release.name,
        manifest_sha256=file_sha256(release / MANIFEST),
        reason=reason.why.strip(),
        who=reason.who,
        issued_at=_now().isoformat(timespec="seconds"),
        expires_at=expires_at.astimezone(UTC).isoformat(timespec="seconds"),
    )
    content, path = canonical_json(permit), permit_path(place, release.name)
    with place.moving():
        path.unlink(missing_ok=True)  # between the two writes there is none, rather than one that does not fit its signature
        write_atomically(path.with_suffix(".sig"), sign_bytes(content, key))
        write_atomically(path, content)
    return permit


def read_permit(place: DeploymentRoot, bundle: str, manifest_sha256: str, public_key: Path) -> str | None:
    """Return the digest of the permit that holds for this very bundle now, or None where there is none or it is over.

    Raises:
        IntegrityError: it was signed with another key, or for another root or another bundle of this name.
        ConfigError: there is a permit and no public key to check it with.
    """
    path = permit_path(place, bundle)
    if not path.is_file():
        return None
    content = path.read_bytes()
    signature = path.with_suffix(".sig")
    if not signature.is_file() or not verify_bytes(content, signature.read_bytes(), public_key):
        raise IntegrityError(f"{PERMITS}/{path.name}: bad signature: it was not signed with the other half of {public_key}")
    try:
        permit = Permit.model_validate_json(content)
        over = datetime.fromisoformat(permit.expires_at) <= _now()
    except (ValidationError, ValueError, TypeError) as error:
        raise IntegrityError(f"{PERMITS}/{path.name}: signed, but no permit that this version reads") from error
    if permit.permit_format != PERMIT_FORMAT or permit.root_id != place.root_id():
        raise IntegrityError(f"{PERMITS}/{path.name}: it was signed for the root {permit.root_id}, not for this one")
    if (permit.bundle, permit.manifest_sha256) != (bundle, manifest_sha256):
        raise IntegrityError(
            f"{PERMITS}/{path.name}: it was signed for {permit.bundle} with the manifest {permit.manifest_sha256[:12]}, "
            f"not {manifest_sha256[:12]}"
        )
    return None if over else file_sha256(path)


def _now() -> datetime:
    return datetime.now(UTC)
