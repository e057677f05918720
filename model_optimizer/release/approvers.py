"""Public keys of approvers as a profile and a record write them: one line of base64, or PEM."""

import base64
import hashlib

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from model_optimizer.artifacts.release import Approver
from model_optimizer.errors import ConfigError
from model_optimizer.release.sign import SigningKey

SHOWN_DIGITS = 16
_SHOWN_CHARACTERS = 40


def one_line(text: str) -> str:
    """Return the one-line form of a public key in either form.

    Raises:
        ValueError: it is no EC P-256 public key.
    """
    der = _load(text).public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(der).decode()


def fingerprint(text: str) -> str:
    """Return the sha256 of a public key's PEM form: that of the signer's `.pub` file."""
    pem = _load(text).public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def public_line(key: SigningKey) -> str:
    """Return the one-line form of a key's public half: what a profile lists."""
    try:
        return one_line(key.public.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"public key {key.public}: {error}") from error


def find_approver(approvers: tuple[Approver, ...], key: SigningKey) -> Approver | None:
    """Return the approver whom a key belongs to, or None."""
    line = public_line(key)
    return next((approver for approver in approvers if approver.public_key == line), None)


def verify_with(content: bytes, signature: bytes, public_key: str) -> bool:
    """Return whether `signature` is exactly what `sign_bytes` gave for `content` under this key."""
    try:
        raw = base64.b64decode(signature, validate=True)
        if base64.b64encode(raw) != signature:  # unused bits of the last character
            return False
        _load(public_key).verify(raw, content, ec.ECDSA(hashes.SHA256()))
    except (ValueError, InvalidSignature):
        return False
    return True


def _load(text: str) -> ec.EllipticCurvePublicKey:
    mend = "give the base64 of a .pub file on one line, or PEM"
    try:
        if "-----BEGIN" in text:
            key = serialization.load_pem_public_key(text.strip().encode())
        else:
            key = serialization.load_der_public_key(base64.b64decode("".join(text.split()), validate=True))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{text[:_SHOWN_CHARACTERS]!r} is no public key; {mend}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(f"{text[:_SHOWN_CHARACTERS]!r} is no EC P-256 key; {mend}")
    return key
