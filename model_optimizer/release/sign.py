"""Signatures with one local EC P-256 key: OpenSSF model signing for a directory, plain ECDSA for a record."""

import base64
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.disk import require_writable
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.release.manifest import MANIFEST, SIGNATURE, manifest_of
from model_optimizer.release.strict_json import read_json
from model_optimizer.release.writer import BundleWriter
from model_optimizer.store import write_atomically

log = logging.getLogger(__name__)

_MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, InvalidSignature)
"""What reading a damaged Sigstore bundle can raise in the model_signing library."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """Where the two halves of a key lie, both PEM."""

    private: Path
    public: Path

    @property
    def public_sha256(self) -> str:
        """Return the sha256 of the public half as written."""
        return file_sha256(self.public)


def ensure_key(path: Path) -> SigningKey:
    """Return the key at `path`, made on first use with mode 0600 and its public half beside it as `.pub`.

    Raises:
        ConfigError: the file is no unencrypted EC P-256 key, or the place cannot be written.
    """
    private = path.expanduser()
    try:
        if not private.is_file():
            private.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _create(private)
        pem = private.read_bytes()
        public_pem = _load_private(pem, private).public_key().public_bytes(*_PUBLIC_FORM)
        public = public_key_path(private)
        if not public.is_file() or public.read_bytes() != public_pem:
            write_atomically(public, public_pem)
    except OSError as error:
        raise ConfigError(f"release.signer.key {private}: {error.strerror}; give a place that can be written") from error
    if private.stat().st_mode & 0o077:
        log.warning("the signing key %s can be read by others; run: chmod 600 %s", private, private)
    return SigningKey(private=private, public=public)


def check_key(path: Path) -> None:
    """Refuse a key that `ensure_key` would refuse, long before something is to be signed; nothing is written.

    Raises:
        ConfigError: the file is no unencrypted EC P-256 key.
        StorageError: there is none, and its folder cannot be written.
    """
    private = path.expanduser()
    if private.is_dir():
        raise ConfigError(f"release.signer.key {private} is a folder; name the file in it")
    if not private.exists():
        require_writable(private.parent)
        return
    try:
        _load_private(private.read_bytes(), private)
    except OSError as error:
        raise ConfigError(f"release.signer.key {private}: {error.strerror}; give a key that can be read") from error


def public_key_path(private: Path) -> Path:
    """Return where the public half of a key lies."""
    expanded = private.expanduser()
    return expanded.with_name(expanded.name + ".pub")


def seal(writer: BundleWriter, key: SigningKey) -> tuple[str, str]:
    """Write manifest.json and model.sig over everything that was written; return the sha256 of each."""
    writer.write(MANIFEST, manifest_of(writer.files))
    digests = {ref.path: ref.sha256 for ref in writer.files}
    sign_digests(writer.directory, digests, key)
    return digests[MANIFEST], file_sha256(writer.directory / SIGNATURE)


def sign_digests(directory: Path, sha256_by_path: Mapping[str, str], key: SigningKey) -> None:
    """Write model.sig, an OpenSSF model signature over every other file of the directory by its known digest."""
    from model_optimizer.release import openssf

    openssf.sign(directory, SIGNATURE, sha256_by_path, key.private)


def verify_digests(where: str, content: bytes, sha256_by_path: Mapping[str, str], public_key: Path) -> None:
    """Check the bytes of a model.sig against the digests of every other file, as they were read.

    Raises:
        IntegrityError: the signature is damaged, of another key, or does not fit the files.
    """
    from model_optimizer.release import openssf

    try:
        read_json(content)
        openssf.check(content, SIGNATURE, sha256_by_path, public_key)
    except _MALFORMED as error:
        reason = " ".join(str(error).split()) or "it was not made with this key or was changed"
        raise IntegrityError(f"{where}: bad signature: {reason}") from error


def sign_bytes(content: bytes, key: SigningKey) -> bytes:
    """Return the base64 form of an ECDSA-SHA256 signature over `content`."""
    private = _load_private(key.private.read_bytes(), key.private)
    return base64.b64encode(private.sign(content, ec.ECDSA(hashes.SHA256())))


def verify_bytes(content: bytes, signature: bytes, public_key: Path) -> bool:
    """Return whether `signature` is exactly what `sign_bytes` gave for `content` under this key.

    Raises:
        ConfigError: `public_key` is no EC P-256 public key.
    """
    public = _load_public(public_key)
    try:
        raw = base64.b64decode(signature, validate=True)
        if base64.b64encode(raw) != signature:  # unused bits of the last character
            return False
        public.verify(raw, content, ec.ECDSA(hashes.SHA256()))
    except (ValueError, InvalidSignature):
        return False
    return True


_PUBLIC_FORM = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _create(path: Path) -> None:
    """Write a new key so that of two processes the first wins and nobody reads a part."""
    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(pem)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
        log.info("made the signing key %s", path)
    finally:
        Path(temporary).unlink()


def _load_private(pem: bytes, path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no unencrypted private key in PEM form; give another or a path that is free") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError(f"{path} is no EC P-256 key; give another or a path that is free")
    return key


def _load_public(path: Path) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"public key {path}: {error.strerror}; give the signer's public key") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no public key in PEM form") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError(f"{path} is no EC P-256 public key")
    return key
