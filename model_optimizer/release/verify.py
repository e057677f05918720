"""Decide whether a bundle may be loaded: every byte against the signed record, before anything is parsed.

Order: the record's own signature; the bytes of manifest.json and model.sig against the record; every
file against the manifest; model.sig over the whole directory; what the bundle says of itself.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.artifacts.release import SignOff
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.release.config import SignerConfig
from model_optimizer.release.manifest import MANIFEST, METADATA, REPORT, SIGNATURE, Manifest, verify_manifest
from model_optimizer.release.sign import public_key_path, verify_directory
from model_optimizer.release.signoff import read_record, record_path


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
    record = None
    if record_path(bundle).exists() or not allow_unsigned:
        record = read_record(bundle, _key(public_key))
        _check_roots(bundle, record)
    manifest = verify_manifest(bundle)
    signed = (bundle / SIGNATURE).exists()
    if signed or not allow_unsigned:
        verify_directory(bundle, _key(public_key))
    return BundleFacts(
        name=bundle.name,
        num_files=len(manifest.files) + 1 + signed,
        num_bytes=sum(ref.num_bytes for ref in manifest.files),
        manifest_sha256=file_sha256(bundle / MANIFEST),
        signed=signed,
        optimizer_hash=_check_contents(bundle, manifest, record),
        record=record,
    )


def _key(public_key: Path | None) -> Path:
    path = public_key or public_key_path(SignerConfig().key)
    if not path.is_file():
        raise ConfigError(f"there is no public key {path}; give the signer's with --public-key")
    return path


def _check_roots(bundle: Path, record: SignOff) -> None:
    """Compare the two files that no manifest lists with the digests in the signed record."""
    if record.bundle != bundle.name:
        raise IntegrityError(f"{record_path(bundle).name}: it was signed for {record.bundle}, not for {bundle.name}")
    for name, sha256 in ((MANIFEST, record.bundle_manifest_sha256), (SIGNATURE, record.signature_sha256)):
        path = bundle / name
        if path.is_symlink():
            raise IntegrityError(f"{bundle.name}/{name}: symlink: a bundle holds only plain files")
        if not path.is_file():
            raise IntegrityError(f"{bundle.name}/{name}: missing: the sign-off record names it")
        if (seen := file_sha256(path)) != sha256:
            raise IntegrityError(f"{bundle.name}/{name}: modified: sha256 {seen[:12]}, the sign-off record says {sha256[:12]}")


def _check_contents(bundle: Path, manifest: Manifest, record: SignOff | None) -> str:
    """Compare report digest and optimizer hash with the record; return the bundle's optimizer hash."""
    try:
        optimizer_hash = str(json.loads((bundle / METADATA).read_bytes())["optimizer_hash"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{bundle.name}/{METADATA}: it does not state the optimizer_hash") from error
    if record is None:
        return optimizer_hash
    report = manifest.file(REPORT)
    if report is None or report.sha256 != record.report_sha256:
        raise IntegrityError(f"{bundle.name}/{REPORT}: modified: it is not the report that was signed off")
    if optimizer_hash != record.optimizer_hash:
        raise IntegrityError(
            f"{bundle.name}/{METADATA}: optimizer hash {optimizer_hash[:12]} is not the one signed off,"
            f" {record.optimizer_hash[:12]} ({record_path(bundle).name})"
        )
    return optimizer_hash
