"""manifest.json: path, size and sha256 of every file of a bundle, and the check that it still holds.

The check reads nothing that a bundle's files say and opens nothing outside the bundle: links and
unsafe paths are refused before any file is hashed.
"""

import json
import os
import stat
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from model_optimizer.artifacts.base import FileRef, Frozen, file_sha256
from model_optimizer.errors import IntegrityError
from model_optimizer.store import canonical_json, write_atomically

MANIFEST = "manifest.json"
SIGNATURE = "model.sig"
METADATA = "model/metadata.json"
REPORT = "metrics/report.json"
BUNDLE_FORMAT = 1
_UNLISTED = (MANIFEST, SIGNATURE)
_MAX_SHOWN = 5


class Manifest(Frozen):
    """Every file of a bundle except the manifest itself and the signature, sorted by path."""

    bundle_format: int
    files: tuple[FileRef, ...]

    def file(self, path: str) -> FileRef | None:
        return next((ref for ref in self.files if ref.path == path), None)


def write_manifest(bundle: Path) -> str:
    """Write manifest.json in canonical form and return its sha256.

    Raises:
        IntegrityError: the bundle holds a link or something that is not a plain file.
    """
    paths = [path for path in _walk(bundle) if path not in _UNLISTED]
    manifest = Manifest(bundle_format=BUNDLE_FORMAT, files=tuple(FileRef.of(bundle, bundle / path) for path in paths))
    write_atomically(bundle / MANIFEST, canonical_json(manifest))
    return file_sha256(bundle / MANIFEST)


def verify_manifest(bundle: Path) -> Manifest:
    """Check every file of a bundle against its manifest and return the manifest.

    Raises:
        IntegrityError: names each file with what is wrong: modified, missing, added, unsafe path,
            symlink, duplicate entry, unknown bundle_format.
    """
    return _verify(bundle, _content_fault)


def verify_sizes(bundle: Path) -> Manifest:
    """Check that a bundle holds exactly the files of its manifest in their sizes, without reading them.

    Raises:
        IntegrityError: as `verify_manifest`, except for content of the right size.
    """
    return _verify(bundle, _size_fault)


def _verify(bundle: Path, fault_of: Callable[[Path, FileRef], str | None]) -> Manifest:
    if not bundle.is_dir():
        raise IntegrityError(f"{bundle}: missing: there is no such bundle directory")
    present = set(_walk(bundle))
    if MANIFEST not in present:
        raise IntegrityError(f"{bundle.name}/{MANIFEST}: missing: what the bundle should hold is unknown")
    manifest = _parse(bundle)
    faults = _faults(bundle, manifest, present - set(_UNLISTED), fault_of)
    if faults:
        more = f" (and {len(faults) - _MAX_SHOWN} more)" if len(faults) > _MAX_SHOWN else ""
        raise IntegrityError("; ".join(f"{bundle.name}/{fault}" for fault in faults[:_MAX_SHOWN]) + more)
    return manifest


def _walk(bundle: Path) -> list[str]:
    """Return the relative paths of all plain files, sorted; anything else is refused without following it."""
    found: list[str] = []
    waiting = [bundle]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                path = Path(entry.path).relative_to(bundle).as_posix()
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    raise IntegrityError(f"{bundle.name}/{path}: symlink: a bundle holds only plain files")
                if stat.S_ISDIR(mode):
                    waiting.append(Path(entry.path))
                elif stat.S_ISREG(mode):
                    found.append(path)
                else:
                    raise IntegrityError(f"{bundle.name}/{path}: special file: a bundle holds only plain files")
    return sorted(found)


def _parse(bundle: Path) -> Manifest:
    """Read manifest.json; it is acceptable only in the exact form that `write_manifest` gives it."""
    where = f"{bundle.name}/{MANIFEST}"
    content = (bundle / MANIFEST).read_bytes()
    try:
        data = json.loads(content)
        bundle_format = data["bundle_format"]
        if bundle_format != BUNDLE_FORMAT:
            raise IntegrityError(f"{where}: unknown bundle_format {bundle_format!r}; this version reads {BUNDLE_FORMAT}")
        manifest = Manifest.model_validate_json(content)
    except (ValueError, KeyError, TypeError, ValidationError, RecursionError) as error:
        raise IntegrityError(f"{where}: modified: it is not a manifest ({type(error).__name__})") from error
    if unsafe := list(_unsafe_entries(manifest)):
        raise IntegrityError("; ".join(f"{where}: {fault}" for fault in unsafe[:_MAX_SHOWN]))
    if not manifest.files:
        raise IntegrityError(f"{where}: modified: it lists no file")
    if canonical_json(manifest) != content:
        raise IntegrityError(f"{where}: modified: it is not in canonical form")
    return manifest


def _unsafe_entries(manifest: Manifest) -> Iterator[str]:
    """Yield a fault for every entry that leaves the bundle or names a file twice."""
    seen: set[str] = set()
    for ref in manifest.files:
        path = PurePosixPath(ref.path)
        if (
            path.is_absolute()
            or ".." in path.parts
            or not path.parts
            or str(path) != ref.path
            or "\\" in ref.path
            or not ref.path.isprintable()
        ):
            yield f"unsafe path {ref.path!r}: entries are relative, without '..', in normal form"
        elif ref.path in _UNLISTED:
            yield f"unsafe path {ref.path!r}: the manifest lists neither itself nor the signature"
        folded = unicodedata.normalize("NFC", ref.path).casefold()
        if folded in seen:
            yield f"duplicate entry {ref.path!r}"
        seen.add(folded)


def _faults(bundle: Path, manifest: Manifest, present: set[str], fault_of: Callable[[Path, FileRef], str | None]) -> list[str]:
    """Return `path: kind: detail` of every file that differs from its entry."""
    listed = {ref.path: ref for ref in manifest.files}
    faults = [f"{path}: missing: {MANIFEST} lists it" for path in sorted(listed.keys() - present)]
    faults += [f"{path}: added: {MANIFEST} does not list it" for path in sorted(present - listed.keys())]
    held = ((path, fault_of(bundle / path, listed[path])) for path in sorted(present & listed.keys()))
    return faults + [f"{path}: modified: {fault}" for path, fault in held if fault]


def _size_fault(path: Path, ref: FileRef) -> str | None:
    num_bytes = path.stat().st_size
    return None if num_bytes == ref.num_bytes else f"{num_bytes} bytes, {MANIFEST} says {ref.num_bytes}"


def _content_fault(path: Path, ref: FileRef) -> str | None:
    if fault := _size_fault(path, ref):
        return fault
    sha256 = file_sha256(path)
    return None if sha256 == ref.sha256 else f"sha256 {sha256[:12]}, {MANIFEST} says {ref.sha256[:12]}"
