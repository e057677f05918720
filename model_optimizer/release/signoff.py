"""The sign-off record beside a bundle: what was decided, on which digests, by whom."""

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from model_optimizer.artifacts.base import file_sha256
from model_optimizer.artifacts.measure import Measure, Verdict
from model_optimizer.artifacts.release import SignOff
from model_optimizer.errors import IntegrityError
from model_optimizer.release.sign import SigningKey, sign_bytes, verify_bytes
from model_optimizer.store import canonical_json, write_atomically

Decided = Literal["signed-off", "refused"]
Level = Literal["provisional", "final", "none"]


def record_path(bundle: Path) -> Path:
    """Return `<bundle>.signoff.json`, beside the bundle."""
    return bundle.with_name(f"{bundle.name}.signoff.json")


def record_signature_path(bundle: Path) -> Path:
    """Return `<bundle>.signoff.sig`, beside the bundle."""
    return bundle.with_name(f"{bundle.name}.signoff.sig")


def decide(verdict: Verdict, soak_s: float, required_soak_s: float) -> tuple[Decided, Level]:
    """Return decision and level: only ACCEPT is signed off, and finally only after the required soak."""
    if verdict is not Verdict.ACCEPT:
        return "refused", "none"
    return "signed-off", "final" if soak_s >= required_soak_s else "provisional"


def gate_rows(measures: tuple[Measure, ...]) -> tuple[dict[str, str | float | None], ...]:
    """Return name, dimension, unit, value, limit and verdict of every measure that gates."""
    return tuple(
        {
            "name": measure.name,
            "dimension": measure.dimension.value,
            "unit": measure.unit,
            "value": measure.value,
            "limit": measure.limit,
            "verdict": measure.verdict.value,
        }
        for measure in measures
        if measure.verdict is not None
    )


def write_record(bundle: Path, record: SignOff, key: SigningKey) -> str:
    """Write record and signature beside the (future) place of the bundle; return the record's sha256."""
    content = canonical_json(record)
    write_atomically(record_signature_path(bundle), sign_bytes(content, key))
    write_atomically(record_path(bundle), content)
    return file_sha256(record_path(bundle))


def read_record(bundle: Path, public_key: Path) -> SignOff:
    """Return the sign-off record of a bundle after checking the record's own signature.

    Raises:
        IntegrityError: record or signature is missing, or they do not fit each other or the key.
    """
    record, signature = record_path(bundle), record_signature_path(bundle)
    for path in (record, signature):
        if not path.is_file():
            raise IntegrityError(f"{path.name}: missing: the bundle {bundle.name} has no complete sign-off record")
    content = record.read_bytes()
    if not verify_bytes(content, signature.read_bytes(), public_key):
        raise IntegrityError(f"{record.name}: bad signature: {signature.name} does not fit it under the key {public_key}")
    try:
        return SignOff.model_validate_json(content)
    except ValidationError as error:
        raise IntegrityError(f"{record.name}: signed, but no sign-off record that this version reads") from error
