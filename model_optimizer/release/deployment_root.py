"""A deployment root on disk: the releases it holds, the link `current`, and the history of its moves.

    deployment.json                    what marks the folder as a deployment root
    releases/<bundle>/                 complete and verified, or not there; its sign-off record lies beside it
    current -> releases/<bundle>       replaced in one rename, so that readers never see a gap
    history.jsonl                      one line per move of `current` that took place
    floors.json, permits/              what may not come back, and signed exceptions (see downgrade.py)

Law: at every moment, a kill included, `current` resolves to a complete, verified release, or does not
exist because nothing was ever deployed. A move is written to a pending file first; whoever comes next
after a kill files it in the history if the link moved, and forgets it if not. Receiving a release and
moving the link have separate locks: a rollback never waits for a copy.
"""

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import filelock
from pydantic import ValidationError

from model_optimizer.artifacts.base import Frozen, file_sha256
from model_optimizer.artifacts.release import SignOff
from model_optimizer.disk import explained
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.release.bundle import sync, sync_tree
from model_optimizer.release.manifest import MANIFEST, verify_sizes
from model_optimizer.release.signoff import record_path, record_signature_path
from model_optimizer.store import canonical_json, write_atomically

MARKER = "deployment.json"
CURRENT = "current"
RELEASES = "releases"
HISTORY = "history.jsonl"
DEPLOYMENT_FORMAT = 1
_OWN_PREFIX = ".deploy"
"""Of the dotfiles that only this module writes: locks, the incoming release, the pending move."""
_LINK_PREFIX = f"{RELEASES}/"

What = Literal["deploy", "rollback", "automatic rollback"]
Guarded = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Reason:
    """Who moves `current` and why; `override` is why a release that is not signed off goes live all the same."""

    who: str
    why: str = ""
    override: str | None = None


class Move(Frozen):
    """One line of the history: `current` went from one release to another (None: there was none)."""

    at: str
    """UTC, ISO 8601."""
    who: str
    what: What
    why: str
    from_bundle: str | None
    to_bundle: str | None
    manifest_sha256: str | None
    """Of the release that `current` points to from then on."""
    override: str | None = None
    permit_sha256: str | None = None
    """Of the signed exception that a downgrade needed."""


@dataclass(frozen=True, slots=True)
class Switched:
    """What a request to move `current` did: None where it pointed there already."""

    move: Move | None
    elapsed_ms: float


class DeploymentRoot:
    """One deployment root; `path` is its folder."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def open(cls, path: Path) -> "DeploymentRoot":
        """Return the deployment root at `path`.

        Raises:
            ConfigError: there is none, or another format.
        """
        try:
            content = (path / MARKER).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path} is not a deployment root, which has a {MARKER}; `model-optimizer deploy BUNDLE --to {path}` makes one"
            ) from error
        try:
            marker = _Marker.model_validate_json(content)
        except ValidationError:
            marker = None
        if marker is None or marker.deployment_format != DEPLOYMENT_FORMAT:
            wanted = f'{{"deployment_format":{DEPLOYMENT_FORMAT}}}'
            raise ConfigError(f"{path / MARKER}: unknown format {content[:60]!r}; this version reads {wanted}")
        return cls(path)

    @classmethod
    def create(cls, path: Path) -> "DeploymentRoot":
        """Return the deployment root at `path`, made where the folder is new or empty.

        Raises:
            ConfigError: the folder holds other things.
            StorageError: it cannot be written.
        """
        with explained(path):
            if not (path / MARKER).exists():
                path.mkdir(parents=True, exist_ok=True)
                foreign = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(_OWN_PREFIX))
                if foreign and not (path / MARKER).exists():
                    shown = ", ".join(foreign[:3])
                    raise ConfigError(f"{path} is not a deployment root but holds {shown}; give an empty or a new folder")
                with cls(path).moving():
                    if not (path / MARKER).exists():
                        write_atomically(path / MARKER, canonical_json(_Marker.fresh()))
            root = cls.open(path)
            (path / RELEASES).mkdir(exist_ok=True)
        return root

    def root_id(self) -> str | None:
        """Return what tells this root from all others; None in one that an earlier version made."""
        return _Marker.model_validate_json((self.path / MARKER).read_bytes()).root_id

    def identify(self) -> str:
        """Return the root's id, given to it where it has none."""
        with self.moving():
            root_id = self.root_id()
            if root_id is None:
                marker = _Marker.fresh()
                write_atomically(self.path / MARKER, canonical_json(marker))
                root_id = marker.root_id
        assert root_id is not None, "a fresh marker has an id"
        return root_id

    def release(self, name: str) -> Path:
        return self.path / RELEASES / name

    def names(self) -> tuple[str, ...]:
        """Return the releases that lie here, in order of name and version."""
        folder = self.path / RELEASES
        found = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
        return tuple(sorted(found, key=_by_version))

    def current(self) -> str | None:
        """Return the release that `current` points to, or None where nothing is deployed.

        Raises:
            IntegrityError: `current` is no link to a release of this root.
        """
        name = self.target()
        if name is not None and ("/" in name or not self.release(name).is_dir()):
            raise IntegrityError(f"{self.path / CURRENT} points to {name}, which is no release of this root; deploy again")
        return name

    def target(self) -> str | None:
        """Return where the link `current` points, below releases/, whether that exists or not."""
        link = self.path / CURRENT
        try:
            return str(link.readlink()).removeprefix(_LINK_PREFIX)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise IntegrityError(f"{link} is no link; move it away and deploy again") from error

    def history(self) -> tuple[Move, ...]:
        """Return every move that took place, oldest first, one that a kill kept from the file included.

        Raises:
            IntegrityError: a line cannot be read.
        """
        moves = [_move(line, f"{HISTORY} line {number}") for number, line in enumerate(self._lines(), start=1)]
        pending = self._pending()
        if pending is not None and pending not in moves[-1:] and pending.to_bundle == self.target():
            moves.append(pending)
        return tuple(moves)

    def earlier(self) -> tuple[str, ...]:
        """Return what one can go back to, nearest first: the releases of `stack` that are here."""
        return tuple(name for name in self.stack() if self.release(name).is_dir())

    def stack(self) -> tuple[str, ...]:
        """Return the names below `current` on the stack of deployments, nearest first.

        A move to a release that is on the stack drops what lies above it, so that going back repeatedly
        goes further back and never returns to what was fled from.
        """
        stack: list[str] = []
        for name in (*(move.to_bundle for move in self.history()), self.current()):
            stack = stack[: stack.index(name)] if name in stack else stack
            stack += [] if name is None else [name]
        return tuple(reversed(stack[:-1]))

    @contextmanager
    def receiving(self) -> Iterator[Path]:
        """Hold the right to bring a release in and yield an empty folder for it; what a kill left there is cleared."""
        incoming = self.path / f"{_OWN_PREFIX}.incoming"
        with explained(self.path), filelock.FileLock(self.path / f"{_OWN_PREFIX}.receive.lock"):
            shutil.rmtree(incoming, ignore_errors=True)
            incoming.mkdir()
            try:
                yield incoming
            finally:
                shutil.rmtree(incoming, ignore_errors=True)

    def admit(self, staged: Path) -> Path:
        """Move a complete, verified release with its record to its place, durably; its directory comes last."""
        sync_tree(staged.parent)
        final = self.release(staged.name)
        for place in (record_signature_path, record_path):
            os.replace(place(staged), place(final))
        staged.rename(final)
        sync(final.parent)
        return final

    def discard(self, name: str, incoming: Path) -> None:
        """Take a release out of its place; the folder that `receiving` yielded takes it until it is cleared.

        Raises:
            IntegrityError: `current` points to it.
        """
        with self.moving():
            if self.target() == name:
                raise IntegrityError(f"release {name} is damaged and current; roll back, then deploy it again")
            self.release(name).rename(incoming / f"{name}.damaged")

    def switch(
        self, to: str | None, what: What, reason: Reason, *, only_from: str | None = None, guard: Guarded | None = None
    ) -> Switched:
        """Point `current` to the release `to` (None: take the link away) and write the move down.

        With `only_from` nothing happens unless `current` still points there. `guard` is asked while nobody else can move
        `current`; it raises, or returns the digest of what permits the move.

        Raises:
            IntegrityError: a file of the release is missing or has another size; `current` stays.
            StorageError: the root cannot be written.
        """
        start = time.perf_counter()
        with self.moving():
            here = self.target()
            move = None
            if to != here and only_from in (None, here):
                move = self._move_to(to, here, what, reason, guard() if guard else None)
        return Switched(move, 1e3 * (time.perf_counter() - start))

    def _move_to(self, to: str | None, here: str | None, what: What, reason: Reason, permit_sha256: str | None) -> Move:
        move = Move(
            at=datetime.now(UTC).isoformat(timespec="microseconds"),
            who=reason.who,
            what=what,
            why=reason.why,
            from_bundle=here,
            to_bundle=to,
            manifest_sha256=None if to is None else check_complete(self.release(to)),
            override=reason.override,
            permit_sha256=permit_sha256,
        )
        write_atomically(self._pending_path, canonical_json(move))
        if to is None:
            (self.path / CURRENT).unlink()
        else:
            link = self.path / f"{_OWN_PREFIX}.{CURRENT}"
            link.unlink(missing_ok=True)
            link.symlink_to(_LINK_PREFIX + to)
            os.replace(link, self.path / CURRENT)
        sync(self.path)
        self._file_pending()
        return move

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Hold the right to move `current`, after finishing what a kill left."""
        with explained(self.path), filelock.FileLock(self.path / f"{_OWN_PREFIX}.move.lock"):
            self._file_pending()
            yield

    @property
    def _pending_path(self) -> Path:
        return self.path / f"{_OWN_PREFIX}.pending.json"

    def _pending(self) -> Move | None:
        try:
            return _move(self._pending_path.read_bytes(), self._pending_path.name)
        except FileNotFoundError:
            return None

    def _file_pending(self) -> None:
        """Append the pending move to the history if it took place and is not there, and forget it."""
        pending = self._pending()
        if pending is None:
            return
        lines = self._lines()
        if pending.to_bundle == self.target() and canonical_json(pending) not in lines[-1:]:
            _append_line(self.path / HISTORY, canonical_json(pending))
        self._pending_path.unlink()

    def _lines(self) -> list[bytes]:
        """Return the whole lines of the history; a last one without its end was torn by a kill and does not count."""
        try:
            return (self.path / HISTORY).read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []


def check_complete(release: Path) -> str:
    """Check that every file of a verified release is there in its size; return the manifest's sha256.

    Quick: it reads no file but the manifest and the record.

    Raises:
        IntegrityError: names the file.
    """
    verify_sizes(release)
    try:
        record = SignOff.model_validate_json(record_path(release).read_bytes())
    except (OSError, ValidationError) as error:
        raise IntegrityError(f"{record_path(release).name}: the release's sign-off record is missing or unreadable") from error
    sha256 = file_sha256(release / MANIFEST)
    if sha256 != record.bundle_manifest_sha256:
        raise IntegrityError(f"{release.name}/{MANIFEST}: modified: it is not the one that was signed off")
    return sha256


class _Marker(Frozen):
    """deployment.json."""

    deployment_format: int
    root_id: str | None = None

    @classmethod
    def fresh(cls) -> "_Marker":
        return cls(deployment_format=DEPLOYMENT_FORMAT, root_id=uuid.uuid4().hex)


def _by_version(name: str) -> tuple[str, int, str]:
    match = re.fullmatch(r"(.+)-v(\d+)", name)
    return (match[1], int(match[2]), "") if match else (name, 0, name)


def _move(content: bytes, where: str) -> Move:
    try:
        return Move.model_validate_json(content)
    except ValidationError as error:
        raise IntegrityError(
            f"{where}: it is no move of a deployment; a rollback that names its VERSION does not need it"
        ) from error


def _append_line(path: Path, line: bytes) -> None:
    """Append one line, durably; the torn end that a kill may have left is cut off first."""
    new = not path.exists()
    with path.open("ab+") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(line + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    if new:
        sync(path.parent)
