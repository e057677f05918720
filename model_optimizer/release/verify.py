"""Decide whether a bundle may be loaded: every byte against the signed record, before anything is parsed.

Order: the record's own signature; names, kinds and sizes of what lies there; manifest.json and model.sig against the record;
every file, read once, against the manifest; model.sig over the digests of that reading; what no file may be; and only then what
the bundle says of itself, from the bytes that were hashed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model_optimizer.artifacts.release import SignOff
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.release.bundle import INCOMING, RELEASES, scratch_root
from model_optimizer.release.config import SignerConfig
from model_optimizer.release.hostile import content_fault, wanted
from model_optimizer.release.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    METADATA,
    REPORT,
    SIGNATURE,
    check_contents,
    check_listing,
    read_manifest,
    refuse,
)
from model_optimizer.release.sign import public_key_path, verify_digests
from model_optimizer.release.signoff import read_record, record_path
from model_optimizer.release.strict_json import read_json
from model_optimizer.release.tree import Content, Entry, OpenTree

MAX_DOCUMENT_BYTES = 1 << 20
"""Of a JSON file that verification hands on with its facts."""


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """What verification established; `record` is None for an unsigned bundle that was allowed."""

    name: str
    num_files: int
    num_bytes: int
    manifest_sha256: str
    signed: bool
    optimizer_hash: str
    record: SignOff | None
    documents: Mapping[str, bytes]
    """The bundle's small JSON files by path, in the bytes that were verified: who parses these parses nothing that was
    exchanged since."""


def verify_bundle(bundle: Path, *, public_key: Path | None, allow_unsigned: bool = False) -> BundleFacts:
    """Check a bundle and its sign-off record against a public key (None: the default signer's).

    `allow_unsigned` accepts an absent signature or record; one that is there must hold all the same.

    Raises:
        IntegrityError: names the file and what is wrong with it.
        ConfigError: a signed bundle, but no public key to check it with.
    """
    if not bundle.is_dir():
        raise IntegrityError(f"{bundle}: missing: there is no such bundle directory")
    bundle = bundle.resolve()
    with OpenTree(bundle) as tree:
        entries = tree.entries()
        _refuse_hard_links(bundle, entries)
        record = None
        if record_path(bundle).exists() or not allow_unsigned:
            record = read_record(bundle, _key(public_key))
        listing, signature = _read_roots(tree, entries, record, allow_unsigned=allow_unsigned)
        manifest = check_listing(tree, entries, listing)
        contents = check_contents(tree, manifest, wanted)
    if signature is not None:
        digests = {MANIFEST: listing.sha256, **{path: content.sha256 for path, content in contents.items()}}
        verify_digests(f"{bundle.name}/{SIGNATURE}", signature.head, digests, _key(public_key))
    faults = ((path, content_fault(path, content)) for path, content in contents.items())
    refuse(bundle.name, [f"{path}: {fault}" for path, fault in faults if fault])
    return BundleFacts(
        name=bundle.name,
        num_files=len(manifest.files) + 1 + (signature is not None),
        num_bytes=sum(ref.num_bytes for ref in manifest.files),
        manifest_sha256=listing.sha256,
        signed=signature is not None,
        optimizer_hash=_check_contents(bundle, contents, record),
        record=record,
        documents={
            path: content.head
            for path, content in contents.items()
            if path.endswith(".json") and content.num_bytes <= MAX_DOCUMENT_BYTES
        },
    )


def _key(public_key: Path | None) -> Path:
    path = public_key or public_key_path(SignerConfig().key)
    if not path.is_file():
        raise ConfigError(f"there is no public key {path}; give the signer's with --public-key")
    return path


def _refuse_hard_links(bundle: Path, entries: Mapping[str, Entry]) -> None:
    """Refuse files that have another name outside the bundle, through which they can be written; the self-check's are ours."""
    faults = []
    for path, entry in entries.items():
        if entry.num_links > 1:
            inside = sum(other.inode == entry.inode for other in entries.values())
            if entry.num_links > inside + _in_scratch(bundle, path, entry) and (bundle / path).lstat().st_nlink > inside:
                faults.append(
                    f"{path}: hard link: {entry.num_links - inside} of its names lie outside the bundle; copy the bundle"
                )
    refuse(bundle.name, faults)


def _in_scratch(bundle: Path, path: str, entry: Entry) -> bool:
    """Return whether the self-check of this very bundle holds a name of a file just now, or left it when it was killed."""
    scratch = scratch_root(bundle.parent, bundle.name.rpartition("-v")[0])
    for folder in (RELEASES, INCOMING):
        try:
            status = (scratch / folder / bundle.name / path).lstat()
        except OSError:
            continue
        if (status.st_dev, status.st_ino) == entry.inode:
            return True
    return False


def _read_roots(
    tree: OpenTree, entries: Mapping[str, Entry], record: SignOff | None, *, allow_unsigned: bool
) -> tuple[Content, Content | None]:
    """Return manifest.json and model.sig, which no manifest lists, after comparing them with the signed record."""
    if record is not None and record.bundle != tree.name:
        raise IntegrityError(f"{tree.name}.signoff.json: it was signed for {record.bundle}, not for {tree.name}")
    listing = read_manifest(tree, entries)
    signature = tree.read_whole(SIGNATURE, MAX_MANIFEST_BYTES) if SIGNATURE in entries else None
    if signature is None and (record is not None or not allow_unsigned):
        raise IntegrityError(
            f"{tree.name}/{SIGNATURE}: missing: the bundle is not signed; --allow-unsigned loads it all the same"
        )
    if record is not None:
        stated = ((MANIFEST, listing, record.bundle_manifest_sha256), (SIGNATURE, signature, record.signature_sha256))
        for name, seen, sha256 in stated:
            if seen is not None and seen.sha256 != sha256:
                detail = f"sha256 {seen.sha256[:12]}, the sign-off record says {sha256[:12]}"
                raise IntegrityError(f"{tree.name}/{name}: modified: {detail}")
    return listing, signature


def _check_contents(bundle: Path, contents: Mapping[str, Content], record: SignOff | None) -> str:
    """Compare report digest and optimizer hash with the record; return the bundle's optimizer hash."""
    try:
        metadata = read_json(contents[METADATA].head)
        optimizer_hash = str(metadata["optimizer_hash"]) if isinstance(metadata, dict) else ""
    except (ValueError, KeyError) as error:
        raise IntegrityError(f"{bundle.name}/{METADATA}: it does not state the optimizer_hash") from error
    if record is None:
        return optimizer_hash
    if REPORT not in contents or contents[REPORT].sha256 != record.report_sha256:
        raise IntegrityError(f"{bundle.name}/{REPORT}: modified: it is not the report that was signed off")
    if optimizer_hash != record.optimizer_hash:
        raise IntegrityError(
            f"{bundle.name}/{METADATA}: optimizer hash {optimizer_hash[:12]} is not the one signed off,"
            f" {record.optimizer_hash[:12]} ({record_path(bundle).name})"
        )
    return optimizer_hash
