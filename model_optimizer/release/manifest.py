"""manifest.json: path, size and sha256 of every file of a bundle, and the check that it still holds.

The check reads nothing that a bundle's files say and opens nothing outside the bundle: links and
unsafe paths are refused before any file is hashed.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from model_optimizer.artifacts.base import FileRef, Frozen, file_sha256
from model_optimizer.errors import IntegrityError
from model_optimizer.release.entry_names import collision, path_fault
from model_optimizer.release.strict_json import read_json
from model_optimizer.release.tree import MAX_FILES, Content, Entry, OpenTree, Wanted, keep_nothing
from model_optimizer.store import canonical_json, write_atomically

MANIFEST = "manifest.json"
SIGNATURE = "model.sig"
METADATA = "model/metadata.json"
REPORT = "metrics/report.json"
BUNDLE_FORMAT = 1
MAX_MANIFEST_BYTES = 16 << 20
"""Of manifest.json and of model.sig: ten thousand entries of the longest paths fit."""
NUM_READERS = 4
"""Files hashed at once; each of them keeps one core busy."""
_UNLISTED = (MANIFEST, SIGNATURE)
_MAX_SHOWN = 5


class Manifest(Frozen):
    """Every file of a bundle except the manifest itself and the signature, sorted by path."""

    bundle_format: int
    files: tuple[FileRef, ...]

    def file(self, path: str) -> FileRef | None:
        return next((ref for ref in self.files if ref.path == path), None)


def manifest_of(files: Iterable[FileRef]) -> bytes:
    """Return manifest.json in canonical form for files whose digests are known."""
    return canonical_json(Manifest(bundle_format=BUNDLE_FORMAT, files=tuple(sorted(files, key=lambda ref: ref.path))))


def write_manifest(bundle: Path) -> str:
    """Hash what lies in a bundle, write manifest.json and return its sha256.

    Raises:
        IntegrityError: the bundle holds a link, something that is not a plain file, or an unsafe name.
    """
    with OpenTree(bundle) as tree:
        contents = read_contents(tree, [path for path in tree.entries() if path not in _UNLISTED])
    files = [FileRef(path=path, num_bytes=content.num_bytes, sha256=content.sha256) for path, content in contents.items()]
    write_atomically(bundle / MANIFEST, manifest_of(files))
    return file_sha256(bundle / MANIFEST)


def verify_manifest(bundle: Path) -> Manifest:
    """Check every file of a bundle against its manifest and return the manifest.

    Raises:
        IntegrityError: names each file with what is wrong: modified, missing, added, unsafe path,
            symlink, duplicate entry, unknown bundle_format.
    """
    with OpenTree(bundle) as tree:
        entries = tree.entries()
        manifest = check_listing(tree, entries, read_manifest(tree, entries))
        check_contents(tree, manifest)
    return manifest


def verify_sizes(bundle: Path) -> Manifest:
    """Check that a bundle holds exactly the files of its manifest in their sizes, without reading them.

    Raises:
        IntegrityError: as `verify_manifest`, except for content of the right size.
    """
    with OpenTree(bundle) as tree:
        entries = tree.entries()
        return check_listing(tree, entries, read_manifest(tree, entries))


def read_manifest(tree: OpenTree, entries: Mapping[str, Entry]) -> Content:
    """Read manifest.json as it lies there.

    Raises:
        IntegrityError: it is missing, no plain file, or too large.
    """
    if MANIFEST not in entries:
        raise IntegrityError(f"{tree.name}/{MANIFEST}: missing: what the bundle should hold is unknown")
    return tree.read_whole(MANIFEST, MAX_MANIFEST_BYTES)


def check_listing(tree: OpenTree, entries: Mapping[str, Entry], content: Content) -> Manifest:
    """Return the manifest that `content` is, after comparing names and sizes with what lies there; no other file is read.

    Raises:
        IntegrityError: as `verify_sizes`.
    """
    manifest = _parse(f"{tree.name}/{MANIFEST}", content.head)
    listed = {ref.path: ref for ref in manifest.files}
    present = {path: entry for path, entry in entries.items() if path not in _UNLISTED}
    faults = [f"{path}: missing: {MANIFEST} lists it" for path in sorted(listed.keys() - present)]
    faults += [f"{path}: added: {MANIFEST} does not list it" for path in sorted(present.keys() - listed)]
    for path, entry in present.items():
        if path in listed and entry.num_bytes != listed[path].num_bytes:
            faults.append(f"{path}: modified: {entry.num_bytes} bytes, {MANIFEST} says {listed[path].num_bytes}")
        elif entry.may_be_bomb and tree.has_hole(path):
            faults.append(
                f"{path}: sparse: {entry.num_bytes} bytes of which {entry.allocated_bytes} are there; it would fill disks"
            )
    refuse(tree.name, faults)
    return manifest


def check_contents(tree: OpenTree, manifest: Manifest, wanted: Wanted = keep_nothing) -> dict[str, Content]:
    """Read every file once and return what was read, after comparing it with the manifest.

    Raises:
        IntegrityError: as `verify_manifest`.
    """
    contents = read_contents(tree, [ref.path for ref in manifest.files], wanted)
    faults = []
    for ref in manifest.files:
        if (seen := contents[ref.path]).num_bytes != ref.num_bytes:
            faults.append(f"{ref.path}: modified: {seen.num_bytes} bytes, {MANIFEST} says {ref.num_bytes}")
        elif seen.sha256 != ref.sha256:
            faults.append(f"{ref.path}: modified: sha256 {seen.sha256[:12]}, {MANIFEST} says {ref.sha256[:12]}")
    refuse(tree.name, faults)
    return contents


def read_contents(tree: OpenTree, paths: list[str], wanted: Wanted = keep_nothing) -> dict[str, Content]:
    """Read files from end to end, several at once."""

    def one(path: str) -> Content:
        return tree.read(path, wanted)

    with ThreadPoolExecutor(NUM_READERS) as pool:
        return dict(zip(paths, pool.map(one, paths), strict=True))


def refuse(name: str, faults: list[str]) -> None:
    """Raise one error that names the first faults of a bundle, if there are any."""
    if faults:
        more = f" (and {len(faults) - _MAX_SHOWN} more)" if len(faults) > _MAX_SHOWN else ""
        raise IntegrityError("; ".join(f"{name}/{fault}" for fault in faults[:_MAX_SHOWN]) + more)


def _parse(where: str, content: bytes) -> Manifest:
    """Return the manifest that `content` is; it is acceptable only in the exact form that `manifest_of` gives it."""
    try:
        data = read_json(content)
    except ValueError as error:
        raise IntegrityError(f"{where}: modified: it is not a manifest: {error}") from error
    if not isinstance(data, dict) or "bundle_format" not in data:
        raise IntegrityError(f"{where}: modified: it is not a manifest: it states no bundle_format")
    if data["bundle_format"] != BUNDLE_FORMAT or isinstance(data["bundle_format"], bool):
        raise IntegrityError(f"{where}: unknown bundle_format {data['bundle_format']!r}; this version reads {BUNDLE_FORMAT}")
    if isinstance(data.get("files"), list) and len(data["files"]) > MAX_FILES:
        raise IntegrityError(f"{where}: too many files: {len(data['files'])}, at most {MAX_FILES} are allowed")
    try:
        manifest = Manifest.model_validate(data, strict=False)
    except ValidationError as error:
        raise IntegrityError(f"{where}: modified: it is not a manifest: {_first(error)}") from error
    if unsafe := list(_unsafe_entries(manifest)):
        raise IntegrityError("; ".join(f"{where}: {fault}" for fault in unsafe[:_MAX_SHOWN]))
    if not manifest.files:
        raise IntegrityError(f"{where}: modified: it lists no file")
    if manifest_of(manifest.files) != content:
        raise IntegrityError(f"{where}: modified: it is not in canonical form")
    return manifest


def _first(error: ValidationError) -> str:
    """Return where and what the first fault of a parsed manifest is."""
    fault = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"


def _unsafe_entries(manifest: Manifest) -> Iterator[str]:
    """Yield a fault for every entry that leaves the bundle, names a file twice or names two that may be one."""
    seen: set[str] = set()
    for ref in manifest.files:
        if fault := path_fault(ref.path):
            yield f"unsafe path {_shown(ref.path)}: {fault}"
        elif ref.path in _UNLISTED:
            yield f"unsafe path {ref.path!r}: the manifest lists neither itself nor the signature"
        elif ref.path in seen:
            yield f"duplicate entry {ref.path!r}"
        seen.add(ref.path)
    if clash := collision(dict.fromkeys((*_UNLISTED, *(ref.path for ref in manifest.files)))):
        yield f"name collision: {_shown(clash[0])} and {_shown(clash[1])} are one file on some file systems"


def _shown(path: str) -> str:
    return ascii(path[:80])
